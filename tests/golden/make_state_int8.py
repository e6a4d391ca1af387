"""Makes the golden vectors of optimizers with 8-bit state: state_int8.json and state_int8.f32, in
this folder.

    pip install numpy && python make_state_int8.py

The reference is written here: the steps in float32, in the order of torch.optim's single-tensor
implementations (Lion: of its paper), and between them the state as the servers keep it. That is a
model in float64: the magnitudes of each code are a table, and a value is rounded to one of its two
neighbours in the table. So every bit of a vector must be met. With 8-bit state, Adam multiplies by
the root of the bias correction instead of dividing by it.

Each case is a training as inputs.py describes it, with gradients limited to -1..1: beside one of
2^40, the state of its tile would be 0. The codes are those of
server/kernels/src/loops/code.rs, and the random numbers those of server/kernels/src/random.rs.
"""

import numpy as np
from inputs import LR_FACTORS, RECORDED, SIZES, STEPS, values, write

CASES = [
    ("sgd momentum", {"name": "sgd", "lr": 0.01, "momentum": 0.9}),
    (
        "sgd dampening",
        {"name": "sgd", "lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    ),
    (
        "sgd nesterov",
        {"name": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    ("adam", {"name": "adam"}),
    ("adam weight_decay", {"name": "adam", "lr": 0.01, "weight_decay": 0.1}),
    ("adam low betas", {"name": "adam", "beta1": 0.3, "beta2": 0.6, "eps": 1e-4}),
    ("adamw", {"name": "adamw"}),
    ("adamw no decay", {"name": "adamw", "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95}),
    ("adamw maximize", {"name": "adamw", "maximize": True}),
    ("lion", {"name": "lion"}),
    ("lion weight_decay", {"name": "lion", "lr": 0.01, "weight_decay": 0.1, "beta2": 0.95}),
]

TILE = 128
#: The bits of the mantissa, the number of magnitudes, and the position of the state tensor.
SIGNED, POSITIVE = (4, 128, 0), (3, 256, 1)
#: The exponent fields of an f32 that a tile may have.
LOWEST, HIGHEST = 35, 254
WORD, DOUBLE_WORD = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

f32 = np.float32


def splitmix64(x):
    """The output function of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & DOUBLE_WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & DOUBLE_WORD
    return x ^ (x >> 31)


def random_bits(step, tensor, tile, size):
    """32 bits for each element of a tile, for the first and the second state tensor."""
    key = splitmix64((splitmix64((step + GOLDEN) & DOUBLE_WORD) + tensor) & DOUBLE_WORD)
    number = splitmix64((key + tile * GOLDEN) & DOUBLE_WORD)
    multiples = np.arange(size, dtype=np.uint64) * np.uint64(GOLDEN >> 32)
    halves = (number & WORD, number >> 32)
    return [(multiples + np.uint64(half)) & np.uint64(WORD) for half in halves]


def with_bias(code):
    """1 + the magnitude of each code, in tiles of which 1 is the number that is added."""
    bits, count, _ = code
    codes = np.arange(count)
    return (1 + codes % (1 << bits) / (1 << bits)) * 2.0 ** (codes >> bits)


def rounded_tile(values, code, random):
    """A tile after a step. `random` has 32 bits for each element."""
    if not np.isfinite(values).all():
        return np.full_like(values, np.nan)
    table, cut = with_bias(code), 23 - code[0]
    # Small numbers are lost beside large ones, as in f32.
    magnitudes = (table - 1).astype(f32).astype(float)
    exact = np.abs(values.astype(float))
    top = int(np.floor(np.log2(magnitudes[-1])))
    field = LOWEST
    while exact.max() > magnitudes[-1] * 2.0 ** (field - 127 - top):
        field += 1
    if field > HIGHEST:
        return np.full_like(values, np.nan)
    unit = 2.0 ** (field - 127 - top)
    biased = ((exact / unit).astype(f32) + f32(1)).astype(float)
    below = np.searchsorted(table, biased, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    gap = np.where(above > below, table[above] - table[below], 1.0)
    random = (random >> np.uint64(32 - cut)).astype(float) / 2.0**cut
    found = np.where((biased - table[below]) / gap + random >= 1, above, below)
    if code is POSITIVE:
        found = np.where(values > 0, np.maximum(found, 1), found)
    magnitude = (magnitudes[found] * unit).astype(f32)
    return magnitude if code is POSITIVE else np.copysign(magnitude, values)


def rounded(values, code, step, tensor):
    """A state tensor after a step."""
    tiles = [
        rounded_tile(tile, code, random_bits(step, tensor, number, len(tile))[code[2]])
        for number, tile in enumerate(np.split(values, range(TILE, len(values), TILE)))
    ]
    return np.concatenate(tiles)


def power(base, exponent):
    """By squaring, as the servers do."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def lerp(start, end, weight):
    """torch.lerp."""
    weight = f32(weight)
    if weight >= 0.5:
        return end + (weight - f32(1)) * (end - start)
    return start + weight * (end - start)


def decayed(gradient, parameter, weight_decay):
    return gradient + parameter * f32(weight_decay) if weight_decay else gradient


def adam(p, g, state, step, lr, options):
    beta1, beta2 = options.get("beta1", 0.9), options.get("beta2", 0.999)
    is_decoupled = options["name"] == "adamw"
    weight_decay = options.get("weight_decay", 0.01 if is_decoupled else 0.0)
    g = decayed(g, p, 0.0 if is_decoupled else weight_decay)
    m, v = state
    m = lerp(m, g, 1.0 - beta1)
    v = v * f32(beta2) + f32(1.0 - beta2) * g * g
    root = np.sqrt(1.0 - power(beta2, step))
    denominator = np.sqrt(v) + f32(options.get("eps", 1e-8) * root)
    kept = f32(1.0 - lr * weight_decay if is_decoupled else 1.0)
    step_size = f32(-(lr * root / (1.0 - power(beta1, step))))
    return p * kept + step_size * m / denominator, (m, v)


def lion(p, g, state, step, lr, options):
    beta1, beta2 = options.get("beta1", 0.9), options.get("beta2", 0.99)
    (m,) = state
    c = m * f32(beta1) + g * f32(1.0 - beta1)
    change = np.where(c == 0, f32(0), np.copysign(f32(lr), c))
    p = p * f32(1.0 - lr * options.get("weight_decay", 0.0)) - change
    return p, (m * f32(beta2) + g * f32(1.0 - beta2),)


def sgd(p, g, state, step, lr, options):
    momentum = f32(options["momentum"])
    g = decayed(g, p, options.get("weight_decay", 0.0))
    undampened = f32(1.0 - options.get("dampening", 0.0))
    b = g if step == 1 else state[0] * momentum + g * undampened
    direction = g + b * momentum if options.get("nesterov") else b
    return p + direction * f32(-lr), (b,)


#: The step of each optimizer, its default learning rate, and the codes of its state tensors.
KINDS = {
    "adam": (adam, 1e-3, (SIGNED, POSITIVE)),
    "adamw": (adam, 1e-3, (SIGNED, POSITIVE)),
    "lion": (lion, 1e-4, (SIGNED,)),
    "sgd": (sgd, 1e-3, (SIGNED,)),
}


def run(options):
    """The parameters after each recorded step."""
    take_step, lr, codes = KINDS[options["name"]]
    lr = options.get("lr", lr)
    parameters = [values(t, 0, size) for t, size in enumerate(SIZES)]
    states = [tuple(np.zeros(size, f32) for _ in codes) for size in SIZES]
    for step in range(1, STEPS + 1):
        for t, size in enumerate(SIZES):
            gradient = np.clip(values(t, step, size), f32(-1), f32(1))
            if options.get("maximize"):
                gradient = -gradient
            factor = LR_FACTORS[(step - 1) % len(LR_FACTORS)]
            parameters[t], state = take_step(
                parameters[t], gradient, states[t], step, lr * factor, options
            )
            states[t] = tuple(
                rounded(tensor, code, step, t) for tensor, code in zip(state, codes, strict=True)
            )
        if step in RECORDED:
            yield from (parameter.copy() for parameter in parameters)


def main():
    vectors = [tensor for _, options in CASES for tensor in run(options)]
    assert all(vector.dtype == f32 and np.isfinite(vector).all() for vector in vectors)
    cases = [{"case": f"{case}, int8 state", "optimizer": options} for case, options in CASES]
    tolerances = {name: 0.0 for name in KINDS}
    reference = {"numpy": np.__version__, "state_dtype": "int8", "tolerances": tolerances}
    write("state_int8.json", "state_int8.f32", reference, cases, vectors)


if __name__ == "__main__":
    main()
