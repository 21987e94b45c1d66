"""Routers of published models, one token at a time in float64 NumPy, as their papers and codes write them."""

import numpy as np


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def highest(values, count):
    """Indices of the highest values, the lower index first where they are equal."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def mixtral(logits, k):
    p = softmax(logits)
    chosen = highest(p, k)
    return chosen, p[chosen] / p[chosen].sum()


def qwen2(logits, k):
    p = softmax(logits)
    chosen = highest(p, k)
    return chosen, p[chosen]


def gpt_oss(logits, k):
    chosen = highest(logits, k)
    return chosen, softmax(logits[chosen])


def llama4(logits):
    chosen = highest(logits, 1)
    return chosen, sigmoid(logits[chosen])


def ernie(logits, bias, k):
    p = softmax(logits)
    chosen = highest(p + bias, k)
    return chosen, p[chosen] / p[chosen].sum()


def deepseek_v3(logits, bias, k, groups, top_groups, factor):
    s = sigmoid(logits)
    c = s + bias
    size = len(c) // groups
    of_group = [np.sort(c[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
    kept = highest(of_group, top_groups)
    masked = np.array([c[e] if e // size in kept else -np.inf for e in range(len(c))])
    chosen = highest(masked, k)
    return chosen, factor * s[chosen] / (s[chosen].sum() + 1e-20)


def deepseek_v3_weights(logits, chosen, factor):
    s = sigmoid(logits)
    return factor * s[chosen] / s[chosen].sum()


def each_token(route, logits, **options):
    """(experts, weights) of tokens [*tokens, experts]."""
    rows = [route(row, **options) for row in np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])]
    tokens = logits.shape[:-1]
    experts, weights = (np.array([row[i] for row in rows]) for i in (0, 1))
    return experts.reshape(*tokens, -1), weights.reshape(*tokens, -1)


def balance(logits, experts, score):
    """The loss of tokens [tokens, experts]."""
    experts = np.asarray(experts)
    count = logits.shape[1]
    s = np.exp(logits) if score == "softmax" else sigmoid(logits)
    means = np.mean(s / s.sum(axis=1)[:, None], axis=0)
    fractions = np.bincount(experts.ravel(), minlength=count) / experts.size
    return count * np.dot(fractions, means)


def derivative(function, x, step=1e-5):
    """Central differences of a scalar function, in float64."""
    x = np.asarray(x, np.float64)
    gradient = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient
