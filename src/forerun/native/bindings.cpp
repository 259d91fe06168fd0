// The Python face of the engine: `_native`. It checks nothing that `backends/cpu` has checked already.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.h"
#include "pack.h"
#include "sampling.h"
#include "select.h"

namespace nb = nanobind;
using namespace forerun;

namespace {

const Kernels& kernels_for(const std::string& isa) {
  const Kernels* kernels = select_kernels(isa.c_str());
  if (!kernels) throw std::invalid_argument("this processor can't run the kernels '" + isa + "'");
  return *kernels;
}

template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

Matrix matrix_from(nb::handle object) {
  Matrix m{};
  m.kind = Kind(nb::cast<int>(object.attr("kind")));
  m.outputs = nb::cast<int>(object.attr("outputs"));
  m.inputs = nb::cast<int>(object.attr("inputs"));
  m.quants = nb::cast<Array<const uint8_t>>(object.attr("quants")).data();
  m.scales = nb::cast<Array<const uint16_t>>(object.attr("scales")).data();
  m.minima = nb::cast<Array<const uint16_t>>(object.attr("minima")).data();
  return m;
}

const float* vector_from(const nb::dict& layer, const char* name) {
  return layer.contains(name) ? nb::cast<Array<const float>>(layer[name]).data() : nullptr;
}

LayerWeights layer_from(const nb::dict& layer) {
  LayerWeights w;
  w.q = matrix_from(layer["q"]);
  w.k = matrix_from(layer["k"]);
  w.v = matrix_from(layer["v"]);
  w.o = matrix_from(layer["o"]);
  w.gate = matrix_from(layer["gate"]);
  w.up = matrix_from(layer["up"]);
  w.down = matrix_from(layer["down"]);
  w.attn_norm = vector_from(layer, "attn_norm");
  w.mlp_norm = vector_from(layer, "mlp_norm");
  w.post_attn_norm = vector_from(layer, "post_attn_norm");
  w.post_mlp_norm = vector_from(layer, "post_mlp_norm");
  w.q_norm = vector_from(layer, "q_norm");
  w.k_norm = vector_from(layer, "k_norm");
  w.q_bias = vector_from(layer, "q_bias");
  w.k_bias = vector_from(layer, "k_bias");
  w.v_bias = vector_from(layer, "v_bias");
  w.o_bias = vector_from(layer, "o_bias");
  w.gate_bias = vector_from(layer, "gate_bias");
  w.up_bias = vector_from(layer, "up_bias");
  w.down_bias = vector_from(layer, "down_bias");
  w.window = nb::cast<int>(layer["window"]);
  w.rope = nb::cast<int>(layer["rope"]);
  return w;
}

// Owns references to the arrays that the decoder reads.
class Model {
 public:
  Model(const std::string& isa, const nb::dict& config, const nb::list& layers, nb::object embed, nb::object head,
        Array<const float> norm, int threads)
      : kept_(nb::make_tuple(layers, embed, head)), norm_(norm) {
    const Kernels* kernels = &kernels_for(isa);
    Config c{};
    c.vocab_size = nb::cast<int>(config["vocab_size"]);
    c.hidden = nb::cast<int>(config["hidden"]);
    c.intermediate = nb::cast<int>(config["intermediate"]);
    c.num_heads = nb::cast<int>(config["num_heads"]);
    c.num_kv_heads = nb::cast<int>(config["num_kv_heads"]);
    c.head_dim = nb::cast<int>(config["head_dim"]);
    c.rotary_dim = nb::cast<int>(config["rotary_dim"]);
    c.norm_eps = nb::cast<float>(config["norm_eps"]);
    c.attention_scale = nb::cast<float>(config["attention_scale"]);
    c.attention_softcap = nb::cast<float>(config["attention_softcap"]);
    c.logit_softcap = nb::cast<float>(config["logit_softcap"]);
    c.embed_scale = nb::cast<float>(config["embed_scale"]);
    c.activation = Activation(nb::cast<int>(config["activation"]));
    std::vector<LayerWeights> weights;
    for (nb::handle layer : layers) weights.push_back(layer_from(nb::cast<nb::dict>(layer)));
    decoder_ = std::make_unique<Decoder>(kernels, c, std::move(weights), matrix_from(embed), matrix_from(head),
                                         norm_.data(), threads);
    hidden_ = c.hidden;
  }

  // feeds: (num_feeds, 3) of first row, rows, cached; pages: all page tables one after the other
  void run(Array<const int32_t> tokens, Array<const int32_t> positions, std::vector<Array<const float>> cosines,
           std::vector<Array<const float>> sines, Array<const int32_t> feeds, Array<const int64_t> pages,
           Array<const uint8_t> trees, Array<const int32_t> wanted, Array<float> logits,
           Array<const int32_t> tap_layers, Array<float> taps) {
    Pass pass{};
    pass.num_rows = int(tokens.shape(0));
    pass.num_feeds = int(feeds.shape(0));
    pass.num_wanted = int(wanted.shape(0));
    pass.tokens = tokens.data();
    pass.positions = positions.data();
    std::vector<const float*> c, s;
    for (const auto& table : cosines) c.push_back(table.data());
    for (const auto& table : sines) s.push_back(table.data());
    pass.cosines = c.data();
    pass.sines = s.data();
    std::vector<Feed> list;
    const int64_t* page = pages.data();
    const uint8_t* tree = trees.shape(0) ? trees.data() : nullptr;
    for (int f = 0; f < pass.num_feeds; ++f) {
      const int32_t* row = feeds.data() + size_t(f) * 4;
      list.push_back({row[0], row[1], row[2], row[3] ? tree : nullptr, page});
      page += (row[1] + row[2] + kPage - 1) / kPage;
      if (row[3]) tree += size_t(row[1]) * row[1];
    }
    pass.feeds = list.data();
    pass.wanted = wanted.data();
    pass.logits = logits.data();
    pass.num_taps = int(tap_layers.shape(0));
    pass.tap_layers = tap_layers.data();
    pass.taps = taps.data();
    nb::gil_scoped_release release;
    decoder_->run(pass);
  }

  int64_t new_page() { return decoder_->new_page(); }
  void free_page(int64_t page) { decoder_->free_page(page); }
  void copy_page(int64_t from, int64_t to) { decoder_->copy_page(from, to); }
  size_t page_bytes() const { return decoder_->page_bytes(); }
  void move_slot(Array<const int64_t> pages, int from, int to) { decoder_->move_slot(pages.data(), from, to); }

 private:
  nb::tuple kept_;
  Array<const float> norm_;
  std::unique_ptr<Decoder> decoder_;
  int hidden_ = 0;
};

// Runs work(begin, end) for pieces of 0 ... count - 1 on a team of threads.
template <class Work> void in_pieces(int count, int piece, int threads, const Work& work) {
  nb::gil_scoped_release release;
  if (threads < 2 || count <= piece) {
    for (int begin = 0; begin < count; begin += piece) work(begin, std::min(begin + piece, count));
    return;
  }
  Shares shares;
  shared_pool(threads).run([&](int) {
    for (int begin = shares.take(piece); begin < count; begin = shares.take(piece)) {
      work(begin, std::min(begin + piece, count));
    }
  });
}

void pack_rows(int kind, Array<const uint8_t> source, Array<const int64_t> row_map, int inputs, Array<uint8_t> quants,
               Array<uint16_t> scales, Array<uint16_t> minima, int threads) {
  const int outputs = int(row_map.shape(0)), tiles = (outputs + kTile - 1) / kTile;
  if (!tiles) return;
  const size_t quants_a_tile = quants.size() / tiles, cells_a_tile = scales.size() / tiles;
  in_pieces(tiles, 8, threads, [&](int begin, int end) {
    pack(Kind(kind), source.data(), int64_t(source.shape(1)), row_map.data() + begin * kTile,
         std::min(outputs, end * kTile) - begin * kTile, inputs, quants.data() + begin * quants_a_tile,
         scales.data() + begin * cells_a_tile, minima.data() + (minima.size() ? begin * cells_a_tile : 0));
  });
}

void quantise_rows(int kind, Array<const float> rows, Array<uint8_t> blocks, int threads) {
  const size_t inputs = rows.shape(1), bytes = blocks.shape(1);
  in_pieces(int(rows.shape(0)), 16, threads, [&](int begin, int end) {
    quantise(Kind(kind), rows.data() + begin * inputs, end - begin, int(inputs), blocks.data() + begin * bytes);
  });
}

// Transforms of rows, by row: largest logit, temperature, top-k, top-p, min-p.
struct RowTransforms {
  const float* highest;
  const float* divisors;
  const int32_t* top_ks;
  const double* top_ps;
  const float* min_ps;
  Transforms operator[](int row) const { return {highest[row], divisors[row], top_ks[row], top_ps[row], min_ps[row]}; }
};

// (R, V) logits to (R, V) laws
void laws(const std::string& isa, Array<const float> x, Array<const float> highest, Array<const float> divisors,
          Array<const int32_t> top_ks, Array<const double> top_ps, Array<const float> min_ps, Array<float> p,
          int threads) {
  const Kernels& kernels = kernels_for(isa);
  const RowTransforms transforms{highest.data(), divisors.data(), top_ks.data(), top_ps.data(), min_ps.data()};
  const size_t n = x.shape(1);
  in_pieces(int(x.shape(0)), 1, threads, [&](int row, int) {
    law(kernels, x.data() + row * n, int(n), transforms[row], p.data() + row * n);
  });
}

// (R, V) logits and (R,) uniforms to a token of each row and its mass
void choose_rows(const std::string& isa, Array<const float> x, Array<const float> highest,
                 Array<const float> divisors, Array<const int32_t> top_ks, Array<const double> top_ps,
                 Array<const float> min_ps, Array<const double> uniforms, Array<int64_t> tokens, Array<float> masses,
                 int threads) {
  const Kernels& kernels = kernels_for(isa);
  const RowTransforms transforms{highest.data(), divisors.data(), top_ks.data(), top_ps.data(), min_ps.data()};
  const size_t n = x.shape(1);
  in_pieces(int(x.shape(0)), 1, threads, [&](int row, int) {
    const Choice choice = choose(kernels, x.data() + row * n, int(n), transforms[row], uniforms.data()[row]);
    tokens.data()[row] = choice.token;
    masses.data()[row] = choice.mass;
  });
}

// (R, V) laws and (R,) keys to the winner of each row
void race_rows(Array<const float> laws, Array<const uint64_t> keys, Array<int64_t> out, int threads) {
  const size_t n = laws.shape(1);
  in_pieces(int(laws.shape(0)), 1, threads, [&](int row, int) {
    out.data()[row] = race(laws.data() + row * n, int(n), keys.data()[row]);
  });
}

// (R, V) values to (R, k) ids
void top_ids_rows(Array<const float> x, Array<int64_t> out, int threads) {
  const size_t n = x.shape(1), k = out.shape(1);
  in_pieces(int(x.shape(0)), 1, threads, [&](int row, int) {
    top_ids(x.data() + row * n, int(n), int(k), out.data() + row * k);
  });
}

// (N, V) rows of p and q, (N,) scales to (N,) masses of max(scale p - q, 0)
void surplus_rows(const std::string& isa, Array<const float> p, Array<const float> q, Array<const float> scales,
                  Array<double> out, int threads) {
  const Kernels& kernels = kernels_for(isa);
  const size_t n = p.shape(1);
  in_pieces(int(p.shape(0)), 1, threads, [&](int row, int) {
    out.data()[row] = surplus(kernels, p.data() + row * n, q.data() + row * n, scales.data()[row], int(n));
  });
}

// one token from each row of (B, V) laws
void draw_rows(const std::string& isa, Array<const float> laws, Array<const double> uniforms, Array<int64_t> out,
               int threads) {
  const Kernels& kernels = kernels_for(isa);
  const size_t n = laws.shape(1);
  in_pieces(int(laws.shape(0)), 1, threads, [&](int row, int) {
    out.data()[row] = draw(kernels, laws.data() + row * n, uniforms.data()[row], int(n));
  });
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("PAGE") = kPage;
  m.def("instruction_sets", &available_sets, "Names of the kernels that this processor can run, best first.");
  m.def("pack", &pack_rows, nb::arg("kind"), nb::arg("source"), nb::arg("row_map"), nb::arg("inputs"),
        nb::arg("quants"), nb::arg("scales"), nb::arg("minima"), nb::arg("threads") = 1);
  m.def("quantise", &quantise_rows, nb::arg("kind"), nb::arg("rows"), nb::arg("blocks"), nb::arg("threads") = 1);
  m.def("laws", &laws);
  m.def("choose", &choose_rows);
  m.def("race", &race_rows);
  m.def("top_ids", &top_ids_rows);
  m.def("surplus", &surplus_rows);
  m.def("draw", &draw_rows);
  nb::class_<Model>(m, "Model")
      .def(nb::init<const std::string&, const nb::dict&, const nb::list&, nb::object, nb::object, Array<const float>, int>())
      .def("run", &Model::run)
      .def("new_page", &Model::new_page)
      .def("free_page", &Model::free_page)
      .def("copy_page", &Model::copy_page)
      .def("move_slot", &Model::move_slot)
      .def_prop_ro("page_bytes", &Model::page_bytes);
}
