"""Independent float64 formulas: each query on its own, from its list of visible keys, by the definition.

A formula gets everything query i may use and returns its row of weights:

    formula(config, p, q_HD, keys_HnD, queries_HnD, distances_n, depth) -> (H, n)

q is the query, keys and queries are those of the n visible positions, distances are i - j. p holds the
learned scalars. Nothing here is shared with the package but parameter values.
"""

import math

import torch

FORMULAS = {}


def formula(name):
    def add(function):
        FORMULAS[name] = function
        return function

    return add


def dots(q, keys):
    return torch.stack([keys[h] @ q[h] for h in range(len(q))])


@formula("softmax")
def softmax(config, p, q, keys, queries, distances, depth):
    return torch.softmax(dots(q, keys) / math.sqrt(q.shape[1]), -1)


@formula("ssmax")
def ssmax(config, p, q, keys, queries, distances, depth):
    n = keys.shape[1]
    s = p["s"][:, None] if config.s == "head" else config.s
    b = p["bias"][:, None] if config.bias == "head" else config.bias
    exponents = (s * math.log(n) + b) * dots(q, keys) / math.sqrt(q.shape[1])
    return torch.softmax(exponents, -1)


@formula("heat")
def heat(config, p, q, keys, queries, distances, depth):
    d, n = q.shape[1], keys.shape[1]
    if config.t == "law":
        t = 0.28 * math.sqrt(4 / depth)
    elif config.t in ("head", "adaptive"):
        level = p["time"]
        if config.t == "adaptive":
            z = dots(q, keys) / math.sqrt(d)
            spread = torch.sqrt(q.square().sum(-1) * keys.square().sum(-1).mean(-1) + 1e-12) / d
            features = torch.stack([z.mean(-1), spread, torch.full_like(spread, math.log(n))], -1)
            level = level + (features * p["adapt"]).sum(-1)
        log_t = math.log(config.t_min) + torch.sigmoid(level) * math.log(config.t_max / config.t_min)
        t = log_t.exp()[:, None]
    else:
        t = config.t
    if config.distance == "dot":
        logits = dots(q, keys) / (2 * t)
    else:
        logits = -(q[:, None] - keys).square().sum(-1) / (4 * t)
    return torch.softmax(logits - config.alpha * distances.square() / (4 * t), -1)


@formula("sigmoid")
def sigmoid(config, p, q, keys, queries, distances, depth):
    n = keys.shape[1]
    bias = {"-log n": -math.log(n)}.get(config.bias, config.bias)
    if config.bias == "head":
        bias = p["bias"][:, None]
    return 1 / (1 + torch.exp(-(dots(q, keys) / math.sqrt(q.shape[1]) + bias)))


@formula("sima")
def sima(config, p, q, keys, queries, distances, depth):
    q_hat = q / queries.abs().sum(1)
    k_hat = keys / keys.abs().sum(1, keepdim=True)
    weights = (q_hat[:, None] * k_hat).sum(-1)
    return weights * (keys.shape[1] if config.scale == "n" else 1)


def visible(i, length, *, causal, window=None, real=None, documents=None, mask=None):
    """The positions query i sees."""
    return [
        j
        for j in range(length)
        if (not causal or j <= i)
        and (window is None or abs(i - j) < window)
        and (real is None or bool(real[j]))
        and (documents is None or documents[j] == documents[i])
        and (mask is None or bool(mask[i, j]))
    ]


def attention(config, p, q, k, v, *, causal, window=None, depth=4, **masks):
    """Mixed values (B, H, L, D) and weights (B, H, L, L) of full-length q, k, v."""
    B, H, L, _ = q.shape
    groups = H // k.shape[1]
    k, v = (torch.stack([x[:, h // groups] for h in range(H)], 1) for x in (k, v))
    outs, rows = [], []
    for b in range(B):
        for i in range(L):
            own = {name: x[b] for name, x in masks.items() if x is not None}
            J = visible(i, L, causal=causal, window=window, **own)
            row = q.new_zeros(H, L)
            if J:
                distances = torch.tensor([float(i - j) for j in J], dtype=q.dtype)
                w = FORMULAS[config.name](config, p, q[b, :, i], k[b][:, J], q[b][:, J], distances, depth)
                row = row.index_copy(1, torch.tensor(J), w.to(q.dtype))
                outs.append(torch.stack([w[h] @ v[b, h, J] for h in range(H)]))
            else:
                outs.append(q.new_zeros(H, v.shape[-1]))
            rows.append(row)
    out = torch.stack(outs).reshape(B, L, H, -1).transpose(1, 2)
    return out, torch.stack(rows).reshape(B, L, H, L).transpose(1, 2)


def wrapped(wrappers, scalars, y):
    """Deterministic output wrappers on (B, H, L, D)."""
    for config, p in zip(wrappers, scalars, strict=True):
        if config.name == "drift" and config.kind == "gain":
            y = y * (1 + (p["gain"][:, None, None] if config.gain == "head" else config.gain))
        elif config.name == "drift":
            gate = p["gate"][:, None] if "gate" in p else y.new_tensor(config.gate)
            baseline = p["baseline"][:, None] if "baseline" in p else config.baseline
            gate = torch.sigmoid(gate)
            y = y + gate * (y - baseline)
    return y


def attention_module(module, x, **view):
    """What a `langevin.models.attention.Attention` must give, from its weights alone."""
    B, L, _ = x.shape

    def project(weight, heads):
        return (x @ weight.T).reshape(B, L, heads, -1).transpose(1, 2)

    q = project(module.q_proj.weight, module.heads)
    k = project(module.k_proj.weight, module.kv_heads)
    v = project(module.v_proj.weight, module.kv_heads)
    p = dict(module.mixer.scalars.named_parameters())
    depth = module.mixer.geometry.depth
    y, _ = attention(module.spec.mixer, p, q, k, v, window=module.window, depth=depth, **view)
    scalars = [dict(s.named_parameters()) for s in module.mixer.wrappers.scalars]
    y = wrapped(module.spec.wrappers, scalars, y)
    return y.transpose(1, 2).reshape(B, L, -1) @ module.o_proj.weight.T + module.o_proj.bias


def gathered(module, x, i, causal, allowed, alive):
    """What token i makes of those at its distances."""
    own, W, config = module.content, x.shape[1], module.config
    hops = [2**n if config.hops == "dilated" else n + 1 for n in range(config.iters)]
    taps = own.taps.reshape(-1, W)
    places = [i, *(i - hop for hop in hops), *([] if causal else [i + hop for hop in hops])]
    seen = [j for j in range(len(x)) if allowed(i, j) and alive(j)]

    def given(j):
        b, v, _ = (own.into.weight @ x[j] + own.into.bias).chunk(3)
        return v / (1 + (-b).exp())

    total = sum((tap * given(j) for tap, j in zip(taps, places, strict=False) if j in seen), x.new_zeros(W))
    assert len(taps) == len(places) + config.mean
    if config.mean and seen:
        total = total + taps[-1] * sum(given(j) for j in seen) / len(seen)
    c = (own.into.weight @ x[i] + own.into.bias)[2 * W :]
    return own.out.weight @ (total * c / (1 + (-c).exp())) + own.out.bias


def passed_on(module, x, i, causal, allowed, alive):
    """What token i makes of what comes from both sides, as a sum over all tokens."""
    own, W = module.recurrent, x.shape[1]
    projected = [own.into.weight @ y + own.into.bias for y in x]
    heard = []
    for side in (-1,) if causal else (-1, 1):
        total, through, j = x.new_zeros(W), x.new_ones(W), i
        while allowed(i, j):
            b, v, _, f = projected[j].chunk(4)
            if alive(j):
                total = total + through * torch.sigmoid(b) * v
                through = through * torch.sigmoid(f + own.keep)
            j += side
        heard.append(total)
    s = heard[0] if causal else torch.cat([heard[0][: W // 2], heard[1][W // 2 :]])
    c = projected[i].chunk(4)[2]
    r = (1 - torch.sigmoid(own.keep) ** 2) ** 0.5
    return own.out.weight @ (r * s * c * torch.sigmoid(c)) + own.out.bias


def neighbor_module(module, x, *, causal, real=None, documents=None):
    """What a module of a NeighborMixer must give, token by token."""
    module = module.mixer
    config = module.config
    B, L, W = x.shape
    outs = []
    for b in range(B):

        def allowed(i, j, b=b):
            inside = 0 <= j < L and (not causal or j <= i)
            return inside and (documents is None or documents[b, i] == documents[b, j])

        def alive(i, b=b):
            return real is None or bool(real[b, i])

        if config.kind in ("content", "recurrent"):
            token = gathered if config.kind == "content" else passed_on
            outs.append(torch.stack([token(module, x[b], i, causal, allowed, alive) for i in range(L)]))
            continue
        h = [x[b, i] if alive(i) else x.new_zeros(W) for i in range(L)]
        for iteration in range(config.iters):
            hop = 2**iteration if config.hops == "dilated" else 1
            step = module.steps[0 if config.shared else iteration]
            new = []
            for i in range(L):
                left = h[i - hop] if allowed(i, i - hop) else x.new_zeros(W)
                right = h[i + hop] if allowed(i, i + hop) else x.new_zeros(W)
                if config.kind == "linear":
                    W1, b1 = step.tap.weight, step.tap.bias
                    u = W1 @ left + b1 + (0 if causal else W1 @ right + b1)
                    value = config.alpha * h[i] + (1 - config.alpha) * u
                else:
                    taps = step.taps.weight
                    n = taps[:, :W] @ left + taps[:, W : 2 * W] @ h[i]
                    n = n if causal else n + taps[:, 2 * W :] @ right
                    a = step.up.weight @ n + step.up.bias
                    gelu = a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))
                    mixed = config.alpha * h[i]
                    mixed = mixed + (1 - config.alpha) * (step.down.weight @ gelu + step.down.bias)
                    centred = mixed - mixed.mean()
                    value = centred / torch.sqrt(centred.square().mean() + step.norm.eps)
                    value = value * step.norm.weight + step.norm.bias
                new.append(value if alive(i) else x.new_zeros(W))
            h = new
        outs.append(torch.stack(h))
    y = torch.stack(outs).reshape(B, L, module.heads, -1).transpose(1, 2)
    scalars = [dict(s.named_parameters()) for s in module.wrappers.scalars]
    return wrapped(module.spec.wrappers, scalars, y).transpose(1, 2).reshape(B, L, W)
