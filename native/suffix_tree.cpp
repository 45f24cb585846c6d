#include "suffix_tree.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr int32_t kNone = -1;

// A state with more successors than this offers only the most frequent one to a branching draft.
constexpr int32_t kWide = 128;

// Weight of what was never seen, against one sighting after a match of one token.
constexpr double kDoubt = 2.5;

// A node that a branching draft may take next.
struct Offer {
    double chance;
    int64_t order;  // ties go to the one found first
    int32_t parent, token, state, context, count;
    int64_t level;
};

bool later(const Offer& a, const Offer& b) {
    return a.chance != b.chance ? a.chance < b.chance : a.order > b.order;
}

}  // namespace

void Continuation::add(int32_t token, int32_t parent, int32_t count, int32_t continued, int32_t context) {
    const double score = count / (continued + kDoubt / context);
    const double path = parent < 0 ? score : nodes[size_t(parent)].path * score;
    nodes.push_back({token, parent, count, continued, context, score, path});
    expected += path;
}

SuffixTree::SuffixTree(int32_t depth, uint64_t key) : depth_(depth), edges_(key) { add_state({0, kNone}); }

// ---------------------------------------------------------------- growing

void SuffixTree::extend(SuffixText& text, const int32_t* tokens, size_t count) {
    for (size_t i = 0; i < count; i++) {
        text.last = append(text.last, tokens[i]);
        count_from(text, tokens[i]);
    }
    tokens_ += int64_t(count);
}

// The state of a text that ended at `last` and goes on with `token`.
int32_t SuffixTree::append(int32_t last, int32_t token) {
    const int32_t known = next(last, token);
    if (known != kNone)  // another text went on like this before
        return at(known).length == at(last).length + 1 ? known : split(last, token, known);
    const int32_t created = add_state({at(last).length + 1, 0});
    for (int32_t from = last; from != kNone; from = at(from).link) {
        const int32_t there = next(from, token);
        if (there == kNone) {
            add_edge(from, token, created);
            continue;
        }
        const int32_t link = at(there).length == at(from).length + 1 ? there : split(from, token, there);
        at(created).link = link;
        break;
    }
    return created;
}

// Give the strings of `old` that are one longer than those of `from`, and all shorter ones, a state of their own: from
// now on they occur at more places than the rest.
int32_t SuffixTree::split(int32_t from, int32_t token, int32_t old) {
    State part = at(old);
    const int32_t edges = part.first;
    part.length = at(from).length + 1;
    part.first = part.last = kNone;
    part.more = 0;
    const int32_t created = add_state(part);
    for (int32_t e = edges; e != kNone; e = edges_[e].next) add_edge(created, edges_[e].token, edges_[e].child);
    at(old).link = created;
    for (; from != kNone; from = at(from).link) {
        State& state = at(from);
        if (state.token == token) {
            if (state.child != old) break;
            state.child = created;
        } else {
            const int32_t e = edges_.find(from, token);
            if (e == kNone || edges_[e].child != old) break;
            edges_[e].child = created;
        }
    }
    return created;
}

// Count the new occurrences: of every suffix of the old text (up to depth) that it was continued, of every suffix of the
// new text that it is there.
void SuffixTree::count_from(SuffixText& text, int32_t token) {
    int32_t counted = kNone, deepest = kNone;
    for (int32_t from = shortened(text.deepest, std::min(text.length, depth_)); from != kNone; from = at(from).link) {
        const int32_t child = next(from, token);
        if (child != counted) {  // neighbours on the way down often lead to the same state
            at(child).count++;
            counted = child;
            if (deepest == kNone) deepest = child;
        }
        State& state = at(from);
        state.continued++;
        if (at(child).count >= state.best_count) {
            state.best_count = at(child).count;
            state.best = token;
        }
    }
    text.length++;
    text.deepest = shortened(deepest, std::min(text.length, depth_));
}

// The state of the suffix of `size` tokens of a string in `state` that is at least as long.
int32_t SuffixTree::shortened(int32_t state, int32_t size) const {
    while (state && at(at(state).link).length >= size) state = at(state).link;
    return state;
}

int32_t SuffixTree::add_state(const State& state) {
    states_.push_back(state);
    return int32_t(states_.size()) - 1;
}

int32_t SuffixTree::next(int32_t state, int32_t token) const {
    const State& from = at(state);
    if (from.token == token) return from.child;
    if (from.first == kNone) return kNone;
    const int32_t e = edges_.find(state, token);
    return e == kNone ? kNone : edges_[e].child;
}

// A successor that is not there yet.
void SuffixTree::add_edge(int32_t state, int32_t token, int32_t child) {
    State& from = at(state);
    if (from.token == kNone) {
        from.token = token;
        from.child = child;
        return;
    }
    from.last = edges_.add(state, token, child, from.last);
    if (from.first == kNone) from.first = from.last;
    from.more++;
}

// ---------------------------------------------------------------- asking

SuffixMatch SuffixTree::match(const int32_t* tokens, size_t count, int32_t longest) const {
    const size_t begin = count > size_t(longest) ? count - size_t(longest) : 0;
    SuffixMatch found{0, 0};
    for (size_t i = begin; i < count; i++) {
        int32_t child = next(found.state, tokens[i]);
        while (child == kNone && found.state) {
            found.state = at(found.state).link;
            found.length = at(found.state).length;
            child = next(found.state, tokens[i]);
        }
        if (child != kNone) found = {child, found.length + 1};
    }
    return continuable(found);
}

SuffixMatch SuffixTree::match_end(const SuffixText& text, int32_t longest) const {
    const int32_t size = std::min(longest, text.length);
    return continuable({shortened(text.deepest, size), size});
}

SuffixMatch SuffixTree::continuable(SuffixMatch found) const {
    while (found.state && at(found.state).best == kNone) {
        found.state = at(found.state).link;
        found.length = at(found.state).length;
    }
    return found;
}

int32_t SuffixTree::occurrences(const int32_t* string, size_t count) const {
    int32_t state = 0;
    for (size_t i = 0; i < count && state != kNone; i++) state = next(state, string[i]);
    return state == kNone ? 0 : at(state).count;
}

Continuation SuffixTree::follow(SuffixMatch from, const SuffixReach& reach, int64_t nodes, int64_t depth) const {
    if (!from.length) return Continuation(0);
    // Bounded before it becomes an integer, which it may be too large for.
    const double wished = std::max(reach.factor * from.length + reach.offset, 0.0);
    const int64_t size = wished < double(nodes) ? int64_t(wished) : nodes;
    depth = std::min(depth, int64_t(depth_) - from.length);
    return reach.branching ? branches(from, size, depth, reach.min_prob)
                           : chain(from, std::min(size, depth), reach.min_prob);
}

Continuation SuffixTree::chain(SuffixMatch from, int64_t size, double least) const {
    Continuation found(from.length);
    double path = 1.0;
    while (int64_t(found.nodes.size()) < size) {
        from = going_on(from);
        const State& state = at(from.state);
        if (!state.continued) break;
        path *= double(state.best_count) / state.continued;
        if (path < least) break;
        found.add(state.best, int32_t(found.nodes.size()) - 1, state.best_count, state.continued, from.length);
        from = {next(from.state, state.best), from.length + 1};
    }
    return found;
}

Continuation SuffixTree::branches(SuffixMatch from, int64_t size, int64_t depth, double least) const {
    Continuation found(from.length);
    std::vector<Offer> queue;  // a heap, the next one first
    int64_t order = 0;
    const auto offer = [&](int32_t parent, SuffixMatch match, double path, int64_t level) {
        match = going_on(match);
        successors(match.state, [&](int32_t token, int32_t count) {
            const double chance = path * count / at(match.state).continued;
            if (!(chance >= least)) return;
            queue.push_back({chance, order++, parent, token, match.state, match.length, count, level});
            std::push_heap(queue.begin(), queue.end(), later);
        });
    };
    offer(kNone, from, 1.0, 1);
    while (!queue.empty() && int64_t(found.nodes.size()) < size) {
        std::pop_heap(queue.begin(), queue.end(), later);
        const Offer best = queue.back();
        queue.pop_back();
        found.add(best.token, best.parent, best.count, at(best.state).continued, best.context);
        if (best.level < depth)
            offer(int32_t(found.nodes.size()) - 1, {next(best.state, best.token), best.context + 1}, best.chance, best.level + 1);
    }
    return found;
}

// A path that ran into the end of its text goes on from a shorter suffix, of at least half its length, that was
// continued elsewhere: a text that repeats itself meets its own end after each repetition.
SuffixMatch SuffixTree::going_on(SuffixMatch path) const {
    while (path.state && !at(path.state).continued && path.length > 1) {
        const int32_t link = at(path.state).link;
        if (int64_t(at(link).length) * 2 < path.length) break;
        path = {link, at(link).length};
    }
    return path;
}

// (token, how often it followed); the most frequent first, the others as they were first seen.
template <class Take> void SuffixTree::successors(int32_t state, const Take& take) const {
    const State& from = at(state);
    if (from.best == kNone) return;
    take(from.best, from.best_count);
    if (from.more >= kWide) return;
    if (from.token != from.best) take(from.token, at(from.child).count);
    for (int32_t e = from.first; e != kNone; e = edges_[e].next)
        if (edges_[e].token != from.best) take(edges_[e].token, at(edges_[e].child).count);
}

}  // namespace paceline
