"""The identity of a model's weights, without an engine: ``pegaflow weights-id`` needs no vLLM.

``files`` chooses the files that an engine loads, ``hub`` finds them in the cache of the Hugging
Face Hub, ``digests`` keeps a SHA-256 digest for each file, ``identity`` makes one id of them.
"""
