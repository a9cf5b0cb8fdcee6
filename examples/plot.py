"""The plot of bench_kv_cache.py: which share of the prompts had its first token by when."""

import pathlib

COLORS = ("#c0392b", "#2471a3")
WIDTH, HEIGHT, MARGIN = 720, 420, 60


def draw(folder: pathlib.Path, rounds: dict[str, list[float]]) -> pathlib.Path:
    """Writes ttft.png if matplotlib is there, else ttft.svg; where it lies.

    ``rounds`` has the sorted seconds of each round by its name.
    """
    try:
        import matplotlib
    except ImportError:
        picture = folder / "ttft.svg"
        picture.write_text(_svg(rounds))
        return picture
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
    for (name, seconds), color in zip(rounds.items(), COLORS, strict=True):
        shares = [(rank + 1) / len(seconds) for rank in range(len(seconds))]
        axes.step(
            [1000 * value for value in seconds], shares, where="post", label=name, color=color
        )
    axes.set(xlabel="time to first token (ms)", ylabel="share of the prompts", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.legend()
    picture = folder / "ttft.png"
    figure.savefig(picture)
    pyplot.close(figure)
    return picture


def _svg(rounds: dict[str, list[float]]) -> str:
    longest = max(max(seconds) for seconds in rounds.values())

    def place(seconds: float, share: float) -> str:
        x = MARGIN + seconds / longest * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN):.1f}"

    def text(x: float, y: float, words: str, color: str = "#333") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="middle">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{place(0, 1)} {place(0, 0)} {place(longest, 0)}" '
        'fill="none" stroke="#333"/>',
        text(WIDTH / 2, HEIGHT - 15, "time to first token (ms)"),
        text(MARGIN, MARGIN - 12, "share of the prompts"),
    ]
    for quarter in range(5):
        x, y = (float(number) for number in place(longest * quarter / 4, quarter / 4).split(","))
        parts.append(text(x, HEIGHT - MARGIN + 18, f"{250 * longest * quarter:.0f}"))
        parts.append(text(MARGIN - 25, y + 4, f"{25 * quarter} %"))
    for row, ((name, seconds), color) in enumerate(zip(rounds.items(), COLORS, strict=True)):
        points = [place(0, 0)]
        for rank, value in enumerate(seconds):
            points += [place(value, rank / len(seconds)), place(value, (rank + 1) / len(seconds))]
        points.append(place(longest, 1))
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(text(WIDTH - MARGIN - 30, HEIGHT - MARGIN - 40 + 18 * row, name, color))
    return "\n".join([*parts, "</svg>", ""])
