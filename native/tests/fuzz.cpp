// Random shapes through every kernel and the whole decoder, with buffers of exactly the right size: run under
// AddressSanitizer and UndefinedBehaviorSanitizer by tests/native/test_sanitizers.py. Exits 0 if nothing is wrong,
// and checks on the way that a row's result does not depend on the rows and threads beside it.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../decoder.h"
#include "fuzz_markov.h"
#include "fuzz_sampler.h"
#include "fuzz_suffix.h"

using namespace paceline;

namespace {

std::mt19937 luck(12345);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(luck); }

std::vector<float> floats(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> out(count);
    for (float& x : out) x = normal(luck);
    return out;
}

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// Rows of blocks of any bytes, but for the fp16 numbers, which stay small: a high byte of 0x24 is about 0.016.
std::vector<uint8_t> blocks_of(const BlockType& type, int rows, int cols) {
    std::vector<uint8_t> raw(size_t(rows) * size_t(cols / type.weights) * type.bytes);
    for (uint8_t& byte : raw) byte = uint8_t(pick(0, 255));
    const std::string name = type.name;
    const size_t end = type.bytes - 1;
    std::vector<size_t> highs = {1};
    if (name == "Q4_1" || name == "Q5_1" || name == "Q4_K" || name == "Q5_K") highs = {1, 3};
    if (name == "Q2_K") highs = {end - 2, end};
    if (name == "Q3_K" || name == "Q6_K") highs = {end};
    for (size_t at = 0; at < raw.size(); at += type.bytes)
        for (size_t high : highs) raw[at + high] = pick(0, 1) ? 0x24 : 0xa4;
    return raw;
}

const char* type_for(Format format, int cols) {
    static const char* names[] = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL",
                                  "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q2_K"};
    if (format == Format::kQ4) return names[pick(1, 2)];
    if (format == Format::kQ4K) return "Q4_K";
    const int wide = format == Format::kQ8F ? 10 : 11;
    return names[pick(0, cols % 256 ? 5 : wide)];
}

std::shared_ptr<Matrix> matrix(int rows, int cols) {
    Format format = Format(pick(0, 4));
    if (format == Format::kQ4K && cols % 256) format = Format::kQ8F;
    const bool rounded = format == Format::kI8 || format == Format::kQ8;
    auto out = std::make_shared<Matrix>(format, rows, cols, rounded && pick(0, 1));
    const auto shares = floats(rounded && pick(0, 1) ? size_t(cols) * kBlock : 0, 0.3f);
    const float* passing = shares.empty() ? nullptr : shares.data();
    if ((format == Format::kQ8 || format == Format::kI8) && pick(0, 1)) {
        const auto values = floats(size_t(rows) * size_t(cols), 0.1f);
        out->take_floats(values.data(), 0, rows, passing);
    } else {
        const BlockType& type = *block_type(type_for(format, cols));
        const auto raw = blocks_of(type, rows, cols);
        out->take_blocks(raw.data(), raw.size() / size_t(rows), type.name, 0, rows, passing);
    }
    std::vector<float> row(static_cast<size_t>(cols));
    for (int r = 0; r < rows; r++) out->row(r, row.data());
    return out;
}

// How far out / mass is from the softmax of the same int8 values in double, beyond what half a step of every weight can
// do, as a share of the largest value.
double int8_error(const float* query, int low, int high, const KeyTile& tile, int d, const float* out, float mass) {
    const int8_t* q = reinterpret_cast<const int8_t*>(query);
    float query_scale;
    std::memcpy(&query_scale, q + d, sizeof query_scale);
    std::vector<double> scores, sum(static_cast<size_t>(d)), steps(static_cast<size_t>(d));
    double peak = -INFINITY, total = 0, largest = 0, worst = 0, scale = 0;
    for (int k = low; k < high; k++) scale = std::fmax(scale, double(tile.value_scale[k]));
    for (int k = low; k < high; k++) {
        double dot = 0;
        for (int i = 0; i < d; i++) dot += double(q[i]) * double(static_cast<const int8_t*>(tile.key[k])[i]);
        scores.push_back(dot * double(query_scale) * double(tile.key_scale[k]));
        peak = std::fmax(peak, scores.back());
    }
    for (int k = low; k < high; k++) {
        const double p = std::exp(scores[size_t(k - low)] - peak);
        total += p;
        for (int i = 0; i < d; i++) {
            const double whole = double(static_cast<const uint8_t*>(tile.value[k])[i]) - 128.0;
            const double v = whole * double(tile.value_scale[k]);
            sum[size_t(i)] += p * v;
            steps[size_t(i)] += 0.5 * std::fabs(whole) * scale / 255.0;
            largest = std::fmax(largest, std::fabs(v));
        }
    }
    for (int i = 0; i < d; i++)
        worst = std::fmax(worst, std::fabs(double(out[i]) / double(mass) - sum[size_t(i)] / total) - steps[size_t(i)] / total);
    return worst / largest;
}

void kernels(const Kernels& table) {
    for (int round = 0; round < 60; round++) {
        const int rows = pick(0, 3) ? pick(1, 21) : pick(30, 70), groups = pick(1, 4), cols = kBlock * (pick(0, 2) ? pick(1, 5) : 8 * pick(1, 2)), d = 16 * (pick(0, 2) ? pick(1, 5) : pick(6, 16));
        const auto weights = matrix(groups * kLanes, cols);
        const auto x = floats(size_t(rows * cols));
        const int blocks = cols / kBlock;
        std::vector<uint8_t> tiles(Quantised::bytes(rows, blocks)), other(tiles.size());
        std::vector<float> y(size_t(rows * groups * kLanes)), plain(y.size());
        const Quantised quantised{tiles.data(), blocks}, theirs{other.data(), blocks};
        const Kernels* portable = kernels_by_name("portable");
        for (int r = 0; r < rows; r++) {
            table.quantise(x.data() + r * cols, blocks, quantised, r, 0, weights->view().spread);
            portable->quantise(x.data() + r * cols, blocks, theirs, r, 0, weights->view().spread);
        }
        require(tiles == other, "every table rounds alike");
        table.gemm(weights->view(), quantised, rows, 0, groups, y.data(), groups * kLanes, false);
        portable->gemm(weights->view(), quantised, rows, 0, groups, plain.data(), groups * kLanes, false);
        for (float v : y) require(std::isfinite(v), "a finite product");
        require(std::memcmp(y.data(), plain.data(), y.size() * 4) == 0, "every table multiplies alike, bit for bit");

        const size_t across = size_t(cols);
        std::vector<float> normed(across), ones(across, 1.0f), gated(across);
        table.rms_norm(x.data(), ones.data(), 1e-5f, cols, normed.data());
        table.silu_mul(x.data(), normed.data(), cols, gated.data());
        auto head = floats(size_t(d));
        const auto angles = floats(size_t(d));
        table.rotate(head.data(), angles.data(), angles.data() + d / 2, d / 2);

        for (Cache cache : {Cache::kF32, Cache::kF16, Cache::kI8}) {
            const int count = pick(1, kTile), queries = pick(1, 16);
            std::vector<uint8_t> keys(size_t(count * d) * cache_bytes(cache)), store(keys.size());
            KeyTile tile;
            tile.count = count;
            for (int k = 0; k < count; k++) {
                auto vector = floats(size_t(d)), same = vector;
                uint8_t* key = keys.data() + size_t(k * d) * cache_bytes(cache);
                uint8_t* value = store.data() + size_t(k * d) * cache_bytes(cache);
                tile.key_scale[k] = table.store(vector.data(), d, cache, true, key);
                tile.value_scale[k] = table.store(same.data(), d, cache, false, value);
                tile.key[k] = key;
                tile.value[k] = value;
            }
            auto q = floats(size_t(queries * d));
            for (int a = 0; a < queries && cache == Cache::kI8; a++) table.pack_query(q.data() + a * d, d);
            const size_t asked = size_t(queries), wide = size_t(d);
            std::vector<float> out(asked * wide), peak(asked), mass(asked), one(wide);
            std::vector<const float*> from;
            std::vector<float*> to;
            std::vector<int> low, high;
            for (int a = 0; a < queries; a++) {
                from.push_back(q.data() + a * d);
                to.push_back(out.data() + a * d);
                low.push_back(pick(0, count));
                high.push_back(pick(0, count));
            }
            table.attend(from.data(), queries, low.data(), high.data(), tile, cache, d, to.data(), peak.data(), mass.data());
            for (size_t a = 0; a < asked && cache == Cache::kI8; a++)
                if (low[a] < high[a]) require(int8_error(from[a], low[a], high[a], tile, d, to[a], mass[a]) < 3e-4, "int8 attention is exact but for weights in steps of 1/255");
            if (cache == Cache::kI8) {
                std::vector<float> its_out(out.size()), its_peak(asked), its_mass(asked);
                std::vector<float*> its_to;
                for (int a = 0; a < queries; a++) its_to.push_back(its_out.data() + a * d);
                portable->attend(from.data(), queries, low.data(), high.data(), tile, cache, d, its_to.data(), its_peak.data(), its_mass.data());
                for (size_t a = 0; a < asked; a++)
                    require(low[a] >= high[a] || (its_peak[a] == peak[a] && its_mass[a] == mass[a] && std::memcmp(its_to[a], to[a], sizeof(float) * wide) == 0),
                            "every table attends to int8 alike, bit for bit");
            }
            for (int a = 0; a < queries; a++) {
                float* target = one.data();
                float its_peak, its_mass;
                table.attend(&from[size_t(a)], 1, &low[size_t(a)], &high[size_t(a)], tile, cache, d, &target, &its_peak, &its_mass);
                require(std::memcmp(&its_peak, &peak[size_t(a)], 4) == 0, "a query's peak is its own");
                if (low[size_t(a)] < high[size_t(a)]) {
                    require(std::memcmp(&its_mass, &mass[size_t(a)], 4) == 0, "a query's mass is its own");
                    require(std::memcmp(target, to[size_t(a)], sizeof(float) * size_t(d)) == 0, "a query's sum is its own");
                }
            }
        }
    }
}

// A random decoder on random ragged steps with trees or chains: the same step with 1 and 3 threads gives the same bits.
void decoder(const Kernels* table) {
    for (int round = 0; round < 16; round++) {
        const bool chains = round % 4 > 1;
        const int kv = pick(1, 2), share = pick(1, 3), d = round % 4 == 2 ? 16 * pick(8, 16) : 16 * pick(1, 2), block = pick(1, 9);
        Shape shape{32 * pick(1, 3), kv * share * 2, kv * 2, d, 32 * pick(1, 3), 1e-5f};
        const int width = shape.heads * d;
        const Cache cache = std::array{Cache::kF32, Cache::kF16, Cache::kI8}[size_t(pick(0, 2))];
        if (width % kBlock) continue;
        std::vector<Layer> layers(2);
        for (Layer& layer : layers) {
            layer.input_norm = layer.post_norm = std::vector<float>(size_t(shape.hidden), 1.0f);
            layer.qkv = matrix(width + 2 * shape.kv_heads * d, shape.hidden);
            layer.out = matrix(shape.hidden, width);
            layer.gate_up = matrix(2 * shape.intermediate, shape.hidden);
            layer.down = matrix(shape.hidden, shape.intermediate);
        }
        std::vector<int64_t> offsets{0}, starts, positions, parents, slots;
        const int groups = pick(1, 4), per_group = 40;
        std::vector<int64_t> tables;
        for (int g = 0; g < groups; g++) {
            const int rows = pick(1, 7), start = pick(0, 150);
            starts.push_back(start);
            for (int b = 0; b < per_group * 5; b++) tables.push_back(1 + g * per_group * 5 + b);
            for (int r = 0; r < rows; r++) {
                const int64_t parent = r == 0 ? -1 : chains ? r - 1 : pick(0, r - 1);
                parents.push_back(parent);
                positions.push_back(r == 0 ? start : positions[size_t(offsets.back() + parent)] + 1);
                slots.push_back(tables[size_t(g * per_group * 5 + (start + r) / block)] * block + (start + r) % block);
            }
            offsets.push_back(offsets.back() + rows);
        }
        const int rows = int(offsets.back());
        const size_t cached = size_t(1 + groups * per_group * 5) * size_t(block) * size_t(shape.kv_heads * d);
        const auto hidden = floats(size_t(rows * shape.hidden));
        std::vector<float> first;
        for (int threads : {1, 3}) {
            std::vector<std::vector<uint8_t>> planes(4, std::vector<uint8_t>(cached * cache_bytes(cache)));
            std::vector<std::vector<float>> scales(4, std::vector<float>(cached / size_t(d)));
            auto own = layers;
            for (size_t l = 0; l < 2; l++) {
                own[l].cache = {planes[2 * l].data(), planes[2 * l + 1].data(), scales[2 * l].data(),
                                scales[2 * l + 1].data()};
            }
            std::vector<float> cos(size_t(200 * d / 2), 0.6f), sin(size_t(200 * d / 2), 0.8f);
            Decoder model(shape, own, cos, sin, cache, table, threads);
            StepView step;
            step.rows = rows;
            step.groups = groups;
            step.block_size = block;
            step.positions = positions.data();
            step.offsets = offsets.data();
            step.starts = starts.data();
            step.parents = chains ? nullptr : parents.data();
            step.caches.push_back({tables.data(), per_group * 5, slots.data(), pick(0, 1) ? 0 : 17});
            step.caches[0].window = round % 2 ? 17 : 0;
            // A smaller step first, so that the large one has to make room.
            auto x = hidden;
            StepView part = step;
            part.groups = 1;
            part.rows = int(offsets[1]);
            model.run(part, 0, 2, x.data());
            x = hidden;
            model.run(step, 0, 2, x.data());
            for (float v : x) require(std::isfinite(v), "finite hidden states");
            if (first.empty()) first = x;
            require(std::memcmp(first.data(), x.data(), sizeof(float) * x.size()) == 0, "threads change nothing");
        }
    }
}

}  // namespace

int main() {
    fuzz_sampler();
    fuzz_suffix();
    int tables = 0;
    for (const char* name : kKernelNames) {
        const Kernels* table = kernels_by_name(name);
        if (table == nullptr) continue;
        kernels(*table);
        decoder(table);
        fuzz_markov(table);
        tables++;
    }
    std::printf("%d tables, nothing wrong\n", tables);
}
