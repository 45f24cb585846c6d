// Random texts that grow in turns through a suffix tree, each answer compared with a scan of the texts.
#include "fuzz_suffix.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "../suffix_tree.h"

namespace paceline {
namespace {

using String = std::vector<int32_t>;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// How often each token followed a string.
std::map<int32_t, int32_t> followers(const std::vector<String>& texts, const String& string) {
    std::map<int32_t, int32_t> seen;
    for (const String& text : texts)
        for (size_t i = string.size(); i < text.size(); i++)
            if (std::equal(string.begin(), string.end(), text.begin() + int64_t(i - string.size()))) seen[text[i]]++;
    return seen;
}

int32_t total(const std::map<int32_t, int32_t>& seen) {
    int32_t sum = 0;
    for (const auto& entry : seen) sum += entry.second;
    return sum;
}

void check_counts(const SuffixTree& tree, const std::vector<String>& texts, int32_t depth) {
    std::map<String, int32_t> counted;
    for (const String& text : texts)
        for (size_t i = 0; i < text.size(); i++)
            for (size_t end = i + 1; end <= std::min(text.size(), i + size_t(depth)); end++)
                counted[String(text.begin() + int64_t(i), text.begin() + int64_t(end))]++;
    for (const auto& [string, count] : counted)
        require(tree.occurrences(string.data(), string.size()) == count, "a string's occurrences");
}

// Each node's numbers are those of its path, of which `context` tokens were looked at.
void check_nodes(const Continuation& found, const std::vector<String>& texts, const String& end, bool chain) {
    std::vector<String> paths;
    double expected = 0.0;
    for (const Continuation::Node& node : found.nodes) {
        require(node.parent >= -1 && node.parent < int32_t(paths.size()), "parents before children");
        String path = node.parent < 0 ? end : paths[size_t(node.parent)];
        require(node.context >= 1 && size_t(node.context) <= path.size(), "a context is a suffix of the path");
        const auto seen = followers(texts, String(path.end() - node.context, path.end()));
        const auto entry = seen.find(node.token);
        require(entry != seen.end() && node.count == entry->second, "a node's count");
        require(node.continued == total(seen), "how often its path was continued");
        for (const auto& other : seen) require(!chain || other.second <= node.count, "a chain's token is the most frequent");
        path.push_back(node.token);
        paths.push_back(path);
        expected += node.path;
    }
    require(expected == found.expected, "what is expected");
}

void compare(std::mt19937& luck, int round) {
    const int32_t depth = 4 + int32_t(luck() % 9), longest = 1 + int32_t(luck() % uint32_t(depth / 2)), letters = 1 + int32_t(luck() % 4);
    SuffixTree tree(depth, luck());
    std::vector<String> texts(1 + luck() % 3);
    std::vector<SuffixText> ends(texts.size());
    for (int turn = 0; turn < 12; turn++) {
        const size_t which = luck() % texts.size();
        String more(luck() % 9);
        // Now and then many successors, so that tables grow.
        for (int32_t& token : more) token = int32_t(luck() % uint32_t(round % 8 ? letters : 1000));
        tree.extend(ends[which], more.data(), more.size());
        texts[which].insert(texts[which].end(), more.begin(), more.end());
    }
    check_counts(tree, texts, depth);
    for (size_t t = 0; t < texts.size(); t++) {
        const String& text = texts[t];
        int32_t want = 0;
        for (int32_t size = 1; size <= std::min(longest, int32_t(text.size())); size++)
            if (!followers(texts, String(text.end() - size, text.end())).empty()) want = size;
        const SuffixMatch found = tree.match(text.data(), text.size(), longest), end = tree.match_end(ends[t], longest);
        require(found.length == want, "the longest match");
        require(end.state == found.state && end.length == found.length, "the end of a text is found where it is looked up");
        const SuffixReach reach{longest, 4.0, double(luck() % 9) - 4.0, double(luck() % 5) / 10.0, luck() % 2 == 1};
        const int64_t nodes = 1 + luck() % 20, deep = 1 + luck() % uint32_t(depth);
        const Continuation drafted = tree.follow(end, reach, nodes, deep);
        require(int64_t(drafted.nodes.size()) <= nodes && drafted.matched == want, "within its budget");
        check_nodes(drafted, texts, String(text.end() - want, text.end()), !reach.branching);
    }
}

// Texts that some automata take quadratic time or memory for.
void hostile() {
    constexpr size_t kTokens = 12000;
    for (size_t period : {size_t(1), size_t(2), size_t(3), kTokens / 2, kTokens}) {
        String text(kTokens);
        for (size_t i = 0; i < kTokens; i++) text[i] = int32_t(i % period);
        SuffixTree tree(64, 7);
        SuffixText end;
        tree.extend(end, text.data(), text.size());
        require(tree.states() <= int32_t(2 * kTokens), "at most two states a token");
        require(tree.tokens() == int64_t(kTokens), "all tokens are there");
        const Continuation found = tree.follow(tree.match_end(end, 32), {32, 1.0, 0.0, 0.0, false}, 32, 32);
        for (size_t i = 0; i < found.nodes.size(); i++)
            require(found.nodes[i].token == int32_t((kTokens + i) % period), "a loop goes on");
        require(found.nodes.size() == (period == kTokens ? 0 : 32), "as far as asked");
    }
}

}  // namespace

void fuzz_suffix() {
    std::mt19937 luck(2025);
    for (int round = 0; round < 400; round++) compare(luck, round);
    hostile();
}

}  // namespace paceline
