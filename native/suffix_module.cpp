// The suffix tree's Python boundary: tokens, texts, states and sizes are checked here, so that a mistake is an exception.
// Nothing runs without the interpreter's lock: calls take microseconds, and two never meet.
#include "suffix_module.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "suffix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

constexpr int64_t kMost = int64_t(1) << 20;  // of a depth, a draft's nodes, a length: far more than anybody needs

using Tokens = std::vector<int32_t>;
using Reach = std::tuple<int32_t, double, double, double, bool>;  // speculation/suffix_tree.py, Reach

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

void check_size(int64_t size) { require(size >= 0 && size <= kMost, "a size must be at least 0 and at most 2^20"); }

void check_tokens(const Tokens& tokens) {
    for (int32_t token : tokens) require(token >= 0, "a token must not be negative");
}

uint64_t random_key() {
    std::random_device luck;
    return uint64_t(luck()) << 32 | luck();
}

// Knows its tree, without keeping it alive: in another one its states would mean nothing.
struct BoundText {
    std::weak_ptr<SuffixTree> tree;
    SuffixText text;
};

class BoundTree {
  public:
    explicit BoundTree(int64_t depth) {
        require(depth >= 1 && depth <= kMost, "a depth must be at least 1 and at most 2^20");
        tree_ = std::make_shared<SuffixTree>(int32_t(depth), random_key());
    }

    BoundText begin(const BoundText* like) const {
        if (like) check_own(*like);
        return {tree_, like ? like->text : SuffixText{}};
    }

    void extend(BoundText& text, const Tokens& tokens) {
        check_own(text);
        check_tokens(tokens);
        require(tree().tokens() + int64_t(tokens.size()) <= SuffixTree::kMostTokens, "a tree holds at most 2^29 tokens");
        whole_ = false;
        tree_->extend(text.text, tokens.data(), tokens.size());
        whole_ = true;
    }

    Continuation draft(const Tokens& end, const Reach& reach, int64_t nodes, int64_t depth, int64_t beyond) const {
        const SuffixReach within = checked(reach, nodes, depth);
        const SuffixMatch found = tree().match(end.data(), end.size(), within.longest);
        return found.length > beyond ? tree().follow(found, within, nodes, depth) : Continuation(found.length);
    }

    Continuation draft_end(const BoundText& text, const Reach& reach, int64_t nodes, int64_t depth) const {
        check_own(text);
        const SuffixReach within = checked(reach, nodes, depth);
        return tree().follow(tree().match_end(text.text, checked_end(within.longest)), within, nodes, depth);
    }

    std::tuple<int32_t, int32_t> match(const Tokens& tokens, int64_t longest) const {
        const SuffixMatch found = tree().match(tokens.data(), tokens.size(), checked_longest(longest));
        return {found.state, found.length};
    }

    std::tuple<int32_t, int32_t> match_end(const BoundText& text, int64_t longest) const {
        check_own(text);
        const SuffixMatch found = tree().match_end(text.text, checked_end(longest));
        return {found.state, found.length};
    }

    Continuation chain(int64_t state, int64_t matched, int64_t size, double least) const {
        check_size(size);
        return tree().chain(checked_match(state, matched), size, least);
    }

    Continuation branches(int64_t state, int64_t matched, int64_t size, int64_t depth, double least) const {
        check_size(size);
        check_size(depth);
        return tree().branches(checked_match(state, matched), size, depth, least);
    }

    int32_t occurrences(const Tokens& string) const { return tree().occurrences(string.data(), string.size()); }
    int32_t states() const { return tree().states(); }
    int64_t tokens() const { return tree().tokens(); }

  private:
    const SuffixTree& tree() const {
        if (!whole_) throw std::runtime_error("memory ran out while this tree grew: it cannot be used any more");
        return *tree_;
    }

    void check_own(const BoundText& text) const { require(text.tree.lock() == tree_, "the text is of another tree"); }

    static SuffixReach checked(const Reach& reach, int64_t nodes, int64_t depth) {
        check_size(nodes);
        check_size(depth);
        const auto& [longest, factor, offset, min_prob, branching] = reach;
        require(std::isfinite(factor) && std::isfinite(offset), "factor and offset must be finite");
        return {checked_longest(longest), factor, offset, min_prob, branching};
    }

    static int32_t checked_longest(int64_t longest) {
        require(longest >= 1 && longest <= kMost, "a match has at least 1 token and at most 2^20");
        return int32_t(longest);
    }

    int32_t checked_end(int64_t longest) const {
        require(longest <= tree().depth(), "the end of a text is known to the tree's depth only");
        return checked_longest(longest);
    }

    SuffixMatch checked_match(int64_t state, int64_t matched) const {
        require(state >= 0 && state < tree().states(), "the tree has no such state");
        require(matched >= 1 && matched <= kMost, "what is continued has at least 1 token and at most 2^20");
        return {int32_t(state), int32_t(matched)};
    }

    std::shared_ptr<SuffixTree> tree_;
    bool whole_ = true;  // no extend() broke off half-way
};

template <class T> nb::list column(const Continuation& found, T Continuation::Node::*field) {
    nb::list values;
    for (const Continuation::Node& node : found.nodes) values.append(node.*field);
    return values;
}

}  // namespace

void bind_suffix(nb::module_& m) {
    using Node = Continuation::Node;
    nb::class_<Continuation>(m, "Continuation")
        .def_ro("matched", &Continuation::matched)
        .def_ro("expected", &Continuation::expected)
        .def_prop_ro("tokens", [](const Continuation& found) { return column(found, &Node::token); })
        .def_prop_ro("parents", [](const Continuation& found) { return column(found, &Node::parent); })
        .def_prop_ro("counts", [](const Continuation& found) { return column(found, &Node::count); })
        .def_prop_ro("continued", [](const Continuation& found) { return column(found, &Node::continued); })
        .def_prop_ro("contexts", [](const Continuation& found) { return column(found, &Node::context); })
        .def_prop_ro("scores", [](const Continuation& found) { return column(found, &Node::score); });
    nb::class_<BoundText>(m, "SuffixText").def_prop_ro("length", [](const BoundText& text) { return text.text.length; });
    nb::class_<BoundTree>(m, "SuffixTree")
        .def(nb::init<int64_t>(), "depth"_a)
        .def("begin", &BoundTree::begin, "like"_a = nb::none())
        .def("extend", &BoundTree::extend, "text"_a, "tokens"_a)
        .def("draft", &BoundTree::draft, "end"_a, "reach"_a, "nodes"_a, "depth"_a, "beyond"_a)
        .def("draft_end", &BoundTree::draft_end, "text"_a, "reach"_a, "nodes"_a, "depth"_a)
        .def("match", &BoundTree::match, "tokens"_a, "longest"_a)
        .def("match_end", &BoundTree::match_end, "text"_a, "longest"_a)
        .def("chain", &BoundTree::chain, "state"_a, "matched"_a, "size"_a, "least"_a)
        .def("branches", &BoundTree::branches, "state"_a, "matched"_a, "size"_a, "depth"_a, "least"_a)
        .def("occurrences", &BoundTree::occurrences, "string"_a)
        .def_prop_ro("states", &BoundTree::states)
        .def_prop_ro("tokens", &BoundTree::tokens);
}

}  // namespace paceline
