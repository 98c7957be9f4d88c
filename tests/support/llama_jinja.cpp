// llama.cpp's Jinja engine as a filter: reads lines {"template": file, "input": variables} and writes lines
// {"text": ...} or {"error": ...}; {"template": file, "caps": true} writes {"caps": what llama.cpp finds it can do}.
#include "jinja/caps.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "json.h"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

// the only function of ggml that the sources need
extern "C" void ggml_abort(const char *, int, const char *, ...) { std::abort(); }

struct parsed_template {
    std::string source;
    jinja::program program;
};

static parsed_template parse(const std::string & path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    jinja::lexer lexer;
    auto tokens = lexer.tokenize(text.str());
    return {tokens.source, jinja::parse_from_tokens(tokens)};
}

int main() {
    std::map<std::string, parsed_template> templates;
    std::string line;
    while (std::getline(std::cin, line)) {
        nlohmann::json out;
        try {
            const common_json in = common_json::parse(line);
            const auto path = in.at("template").get<std::string>();
            if (!templates.count(path)) {
                templates.emplace(path, parse(path));
            }
            auto & chosen = templates.at(path);
            if (in.contains("caps")) {
                out["caps"] = jinja::caps_get(chosen.program).to_map();
            } else {
                jinja::context context(chosen.source);
                jinja::global_from_json(context, in.at("input"), true);
                jinja::runtime runtime(context);
                const auto parts = jinja::runtime::gather_string_parts(runtime.execute(chosen.program));
                out["text"] = parts->as_string().str();
            }
        } catch (const std::exception & error) {
            out["error"] = error.what();
        }
        std::cout << out.dump() << "\n";
    }
}
