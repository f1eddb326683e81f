// Attention on Values: the loops of stages 0 and 1, one node an operation.

#include <algorithm>
#include <limits>

#include "value_graph.hpp"

namespace ladder {

Attention::Attention(Shape shape, const double* q, const double* k, const double* v, double scale,
                     double* o)
    : shape_(shape) {
    const auto [heads, Nq, Nk, d] = shape;
    const auto leaves = [this](const double* x, std::size_t size, std::vector<Value*>& values) {
        values.reserve(size);
        for (std::size_t i = 0; i < size; ++i) values.push_back(graph_.leaf(x[i]));
    };
    leaves(q, heads * Nq * d, q_);
    leaves(k, heads * Nk * d, k_);
    leaves(v, heads * Nk * d, v_);
    o_.reserve(heads * Nq * d);
    for (std::size_t head = 0; head < heads; ++head) {
        attend_head(&q_[head * Nq * d], &k_[head * Nk * d], &v_[head * Nk * d], scale);
    }
    std::transform(o_.begin(), o_.end(), o, [](const Value* x) { return x->data; });
}

// One head: q (Nq, d), k and v (Nk, d); appends its o (Nq, d) to o_.
void Attention::attend_head(Value* const* q, Value* const* k, Value* const* v, double scale) {
    const auto [heads, Nq, Nk, d] = shape_;
    std::vector<Value*> p(Nk);  // (Nk,), and s before it
    for (std::size_t i = 0; i < Nq; ++i) {
        double m_i = -std::numeric_limits<double>::infinity();
        for (std::size_t j = 0; j < Nk; ++j) {
            Value* s = graph_.mul(q[i * d], k[j * d]);
            for (std::size_t c = 1; c < d; ++c) {
                s = graph_.add(s, graph_.mul(q[i * d + c], k[j * d + c]));
            }
            p[j] = graph_.mul(s, scale);
            m_i = std::max(m_i, p[j]->data);
        }
        for (std::size_t j = 0; j < Nk; ++j) p[j] = graph_.exp(graph_.sub(p[j], m_i));
        Value* l_i = p[0];
        for (std::size_t j = 1; j < Nk; ++j) l_i = graph_.add(l_i, p[j]);
        Value* l_inv = graph_.reciprocal(l_i);
        for (std::size_t c = 0; c < d; ++c) {
            Value* acc = graph_.mul(p[0], v[c]);
            for (std::size_t j = 1; j < Nk; ++j) {
                acc = graph_.add(acc, graph_.mul(p[j], v[j * d + c]));
            }
            o_.push_back(graph_.mul(acc, l_inv));
        }
    }
}

void Attention::backward(const double* dO, double* dq, double* dk, double* dv) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < o_.size(); ++i) o_[i]->grad = dO[i];
    graph_.backward();
    std::transform(q_.begin(), q_.end(), dq, Graph::take_grad);
    std::transform(k_.begin(), k_.end(), dk, Graph::take_grad);
    std::transform(v_.begin(), v_.end(), dv, Graph::take_grad);
}

}  // namespace ladder
