#include "router/http/form_text.h"

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

const std::string kType = "multipart/form-data; boundary=B";

std::string part(const std::string& lines, const std::string& content) {
  return "--B\r\n" + lines + "\r\n\r\n" + content + "\r\n";
}

std::string field(const std::string& name, const std::string& content) {
  return part("Content-Disposition: form-data; name=\"" + name + "\"", content);
}

std::string model_of(const std::string& body, const std::string& type = kType) {
  return std::string(form_field(body, type, "model").value_or("(none)"));
}

TEST_SUITE("form_field") {
  TEST_CASE("a field is found before, between and after files") {
    const std::string file = part(
        "Content-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n"
        "Content-Type: audio/wav",
        std::string("RIFF\r\n\r\n--\r\n--A\r\n") + '\0' + "name=\"model\"");
    CHECK(model_of(field("model", "m") + file + "--B--\r\n") == "m");
    CHECK(model_of(file + field("model", "m") + "--B--\r\n") == "m");
    CHECK(model_of(file + field("model", "m") + file + "--B--") == "m");
    CHECK(model_of(file + "--B--\r\n") == "(none)");
    CHECK(model_of("preamble\r\n" + field("model", "org/name-1") + "--B--\r\n") == "org/name-1");
    CHECK(model_of(field("model", "") + "--B--\r\n") == "");
  }

  TEST_CASE("of several fields the last is used, and none after the end") {
    CHECK(model_of(field("model", "a") + field("model", "b") + "--B--\r\n") == "b");
    CHECK(model_of(field("model", "a") + "--B--\r\n" + field("model", "b")) == "a");
  }

  TEST_CASE("a file named like the field is not a field, whatever its file name") {
    const std::string file =
        part("Content-Disposition: form-data; name=\"model\"; filename=\"\"", "x");
    CHECK(model_of(file + "--B--\r\n") == "(none)");
    CHECK(model_of(part("Content-Disposition: attachment; name=\"model\"", "x") + "--B--\r\n") ==
          "(none)");
  }

  TEST_CASE("names and boundaries are written in several ways") {
    for (const char* const disposition :
         {"content-disposition:form-data;name=model",
          "Content-Type: text/plain\r\n"
          "CONTENT-DISPOSITION: Form-Data; x=\"a;b\"; NAME = \"mo\\del\"; y",
          "Content-Disposition: form-data ; name=\"model\" ; z=1"}) {
      CAPTURE(disposition);
      CHECK(model_of(part(disposition, "m") + "--B--\r\n") == "m");
    }
    const std::string body = field("model", "m") + "--B--\r\n";
    for (const char* const type : {"multipart/form-data;boundary=B",
                                   "Multipart/Form-Data; charset=\"a;boundary=C\"; "
                                   "BOUNDARY=\"B\"",
                                   "multipart/form-data; boundary=B ; x=1"}) {
      CAPTURE(type);
      CHECK(model_of(body, type) == "m");
    }
    for (const char* const type :
         {"", "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; x",
          "multipart/form-data; boundary=\"", "multipart/mixed; boundary=B", "application/json"}) {
      CAPTURE(type);
      CHECK(model_of(body, type) == "(none)");
    }
  }

  TEST_CASE("content may look like a delimiter") {
    CHECK(model_of(field("model", "a\r\n--Bb\r\n--B-\r\nc") + "--B--\r\n") ==
          "a\r\n--Bb\r\n--B-\r\nc");
    CHECK(model_of("--B \t\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--B--") ==
          "m");
  }

  TEST_CASE("the value is a view into the form, even if it is empty") {
    const std::string head = "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n";
    for (const char* const content : {"m\r\n", "\r\n", ""}) {  // An empty part without its CRLF.
      CAPTURE(content);
      const std::string body = head + content + "--B--";
      const auto value = form_field(body, kType, "model");
      REQUIRE(value.has_value());
      CHECK(value->data() == body.data() + head.size());
    }
  }

  TEST_CASE("a form may be cut at any byte") {
    const std::string whole = field("a", "1") + field("model", "m") + "--B--\r\n";
    for (std::size_t size = 0; size < whole.size(); ++size) {
      CAPTURE(size);
      const std::string found = model_of(whole.substr(0, size));
      const bool may_be_found = found == "m" || found == "(none)";
      CHECK(may_be_found);
    }
    for (const char* const body : {"--B", "--B\r", "--B\r\n", "--B--", "\r\n--B", "--B\r\n\r\n",
                                   "--B\r\n\r\n\r\n", "--B\r\n\r\n--B--", "--Bx\r\n"}) {
      CAPTURE(body);
      CHECK(model_of(body) == "(none)");
    }
  }

  TEST_CASE("random forms return their last field") {
    std::mt19937 random(5);  // The same in every run.
    const std::vector<std::string> names = {"model", "file", "prompt"};
    const std::vector<std::string> pieces = {"\r\n", "--", "B", "-", "\r", "\n", "x", "--B", ""};
    for (int i = 0; i < 3000; ++i) {
      std::string body;
      std::string wanted = "(none)";
      for (unsigned part = random() % 4; part > 0; --part) {
        const std::string& name = names[random() % names.size()];
        std::string content;
        for (unsigned size = random() % 8; size > 0; --size) {
          content += pieces[random() % pieces.size()];
        }
        // A delimiter in the content ends it.
        const std::string around = "\r\n" + content + "\r\n";
        if (around.find("\r\n--B\r\n") != std::string::npos ||
            around.find("\r\n--B--") != std::string::npos) {
          continue;
        }
        body += field(name, content);
        if (name == "model") wanted = content;
      }
      CAPTURE(body);
      CHECK(model_of(body + "--B--\r\n") == wanted);
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
