"""Makes the golden vectors that the optimizers are tested against: cases.json and vectors.f32,
beside this file.

    pip install torch numpy && python make.py

torch.optim (foreach=False, fused=False: its single-tensor reference implementations) is the
reference for all that it has; the others are written here from their papers (PAPERS), in float64.
Each case is a training as inputs.py describes it.

torch's bits differ from machine to machine, for two reasons (both seen in torch 2.15):
- Its AVX2 and AVX-512 kernels contract some products and sums to fused multiply-adds, in the vector
  part of a tensor and not in its tail. So this script asks for its default kernels, which round
  every operation, as ours do.
- Its float square root is MKL's, where 0.6 % of the results are one unit in the last place away
  from the nearest. So each case that has a square root is run twice: as torch is, for vectors.f32,
  and with a correctly rounded square root (in float64, then rounded, which is exact), of whose
  results cases.json has a checksum. The first must be met within a tolerance, the second bit for
  bit. (Adafactor sums squares, in float32 in torch. It runs in float64 here, and has
  no checksum.)
"""

import contextlib
import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import numpy as np
import torch
from inputs import LR_FACTORS, RECORDED, SIZES, STEPS, values, write

#: Shapes of the tensors' SIZES. Gradients of matrices are limited to -1..1: the product of the
#: second moments of a row and a column with a gradient of 2^40 overflows.
MATRICES = [[], [1, 7], [17, 59]]

#: The largest difference of a parameter from its vector, relative to the vector or to 1, whichever
#: is larger. 0 requires equal bits.
TOLERANCES = {
    "sgd": 0.0,
    "asgd": 0.0,
    "adam": 1e-7,
    "adamw": 1e-7,
    "adamax": 0.0,
    "nadam": 1e-7,
    "radam": 1e-7,
    "adagrad": 2e-7,
    "adadelta": 1e-7,
    # The reference is computed in float64, and a step moves a parameter by a share of its norm.
    "adafactor": 1e-5,
    # Small averages lead to large steps, which momentum accumulates.
    "rmsprop": 1e-6,
    # The reference is computed in float64, so the difference is the f32 rounding over 50 steps.
    "lion": 2e-6,
    "lamb": 2e-6,
}

CASES = [
    ("sgd", {"name": "sgd"}),
    ("sgd weight_decay", {"name": "sgd", "lr": 0.05, "weight_decay": 0.1}),
    ("sgd momentum", {"name": "sgd", "lr": 0.01, "momentum": 0.9}),
    (
        "sgd dampening",
        {"name": "sgd", "lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    ),
    (
        "sgd nesterov",
        {"name": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    ("sgd maximize", {"name": "sgd", "lr": 0.01, "momentum": 0.8, "maximize": True}),
    ("asgd", {"name": "asgd"}),
    ("asgd average", {"name": "asgd", "lr": 0.05, "lambd": 0.01, "t0": 5.0, "weight_decay": 0.1}),
    ("asgd maximize", {"name": "asgd", "alpha": 0.5, "t0": 20.0, "maximize": True}),
    ("adam", {"name": "adam"}),
    ("adam weight_decay", {"name": "adam", "lr": 0.01, "weight_decay": 0.1}),
    ("adam amsgrad", {"name": "adam", "amsgrad": True}),
    ("adam low betas", {"name": "adam", "beta1": 0.3, "beta2": 0.6, "eps": 1e-4}),
    ("adam maximize", {"name": "adam", "weight_decay": 0.01, "amsgrad": True, "maximize": True}),
    ("adamw", {"name": "adamw"}),
    ("adamw no decay", {"name": "adamw", "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95}),
    ("adamw amsgrad", {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("adamw maximize", {"name": "adamw", "maximize": True}),
    ("adagrad", {"name": "adagrad"}),
    ("adagrad lr_decay", {"name": "adagrad", "lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("adagrad initial value", {"name": "adagrad", "initial_accumulator_value": 0.1}),
    ("adagrad maximize", {"name": "adagrad", "maximize": True}),
    ("adadelta", {"name": "adadelta"}),
    ("adadelta weight_decay", {"name": "adadelta", "lr": 0.5, "rho": 0.95, "weight_decay": 0.01}),
    ("adadelta maximize", {"name": "adadelta", "maximize": True}),
    ("rmsprop", {"name": "rmsprop"}),
    ("rmsprop weight_decay", {"name": "rmsprop", "lr": 0.001, "alpha": 0.9, "weight_decay": 0.1}),
    ("rmsprop momentum", {"name": "rmsprop", "momentum": 0.9}),
    ("rmsprop centered", {"name": "rmsprop", "centered": True}),
    (
        "rmsprop centered momentum",
        {"name": "rmsprop", "centered": True, "momentum": 0.5, "weight_decay": 0.01},
    ),
    ("rmsprop maximize", {"name": "rmsprop", "maximize": True}),
    ("adamax", {"name": "adamax"}),
    (
        "adamax weight_decay",
        {"name": "adamax", "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1},
    ),
    ("adamax maximize", {"name": "adamax", "eps": 1e-4, "maximize": True}),
    ("nadam", {"name": "nadam"}),
    (
        "nadam weight_decay",
        {"name": "nadam", "lr": 0.01, "beta1": 0.8, "momentum_decay": 0.1, "weight_decay": 0.1},
    ),
    (
        "nadam decoupled",
        {"name": "nadam", "lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    ("nadam maximize", {"name": "nadam", "beta2": 0.9, "eps": 1e-4, "maximize": True}),
    ("radam", {"name": "radam"}),
    ("radam weight_decay", {"name": "radam", "lr": 0.01, "beta2": 0.9, "weight_decay": 0.1}),
    (
        "radam decoupled",
        {"name": "radam", "lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    ("radam maximize", {"name": "radam", "beta1": 0.8, "eps": 1e-4, "maximize": True}),
    ("lion", {"name": "lion"}),
    (
        "lion weight_decay",
        {"name": "lion", "lr": 0.001, "beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1},
    ),
    ("lion maximize", {"name": "lion", "maximize": True}),
    ("lamb", {"name": "lamb"}),
    ("lamb weight_decay", {"name": "lamb", "lr": 0.01, "weight_decay": 0.1}),
    ("lamb maximize", {"name": "lamb", "beta1": 0.8, "weight_decay": 0.01, "maximize": True}),
    ("adafactor", {"name": "adafactor"}),
    ("adafactor matrices", {"name": "adafactor"}, MATRICES),
    (
        "adafactor weight_decay",
        {"name": "adafactor", "lr": 0.02, "beta2_decay": -0.5, "weight_decay": 0.1},
        MATRICES,
    ),
    (
        "adafactor maximize",
        {"name": "adafactor", "eps1": 1e-3, "eps2": 0.1, "d": 2.0, "maximize": True},
        [[1, 1], [7, 1], [1, 17, 1, 59]],
    ),
]


#: torch's optimizers by the names of the servers', which are the same in lower case.
KINDS = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}


def torch_optimizer(hyperparameters, parameters):
    options = dict(hyperparameters)
    kind = KINDS[options.pop("name")]
    if "beta1" in options or "beta2" in options:
        options["betas"] = (options.pop("beta1", 0.9), options.pop("beta2", 0.999))
    if kind is torch.optim.Adafactor:
        options["eps"] = (options.pop("eps1", 2.0**-23), options.pop("eps2", 1e-3))
    return kind(parameters, foreach=False, **options)


def run_torch(hyperparameters, shapes):
    dtype = torch.float64 if hyperparameters["name"] == "adafactor" else torch.float32
    parameters = [
        torch.from_numpy(values(t, 0, size).copy()).to(dtype).view(shape)
        for t, (size, shape) in enumerate(zip(SIZES, shapes))
    ]
    optimizer = torch_optimizer(hyperparameters, parameters)
    group = optimizer.param_groups[0]
    lr = group["lr"]
    for step in range(1, STEPS + 1):
        group["lr"] = lr * LR_FACTORS[(step - 1) % len(LR_FACTORS)]
        for t, parameter in enumerate(parameters):
            gradient = torch.from_numpy(values(t, step, parameter.numel()).copy()).to(dtype)
            if any(len(shape) > 1 for shape in shapes):
                gradient = gradient.clamp(-1, 1)
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        if step in RECORDED:
            yield [parameter.float().numpy().ravel().copy() for parameter in parameters]


def lion(w, m, g, step, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
    """Chen et al. (2023), algorithm 2."""
    c = beta1 * m[0] + (1 - beta1) * g
    # A sign that f32 could see otherwise would make the vector useless: choose other values then.
    size = beta1 * np.abs(m[0]) + (1 - beta1) * np.abs(g)
    assert (np.abs(c) >= 1e-6 * size).all(), "an update whose sign depends on rounding"
    w -= lr * (np.sign(c) + weight_decay * w)
    m[0] = beta2 * m[0] + (1 - beta2) * g


def lamb(w, m, g, step, lr, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
    """You et al. (2020), algorithm 2, with phi the identity."""
    m[0] = beta1 * m[0] + (1 - beta1) * g
    m[1] = beta2 * m[1] + (1 - beta2) * g**2
    r = m[0] / (1 - beta1**step) / (np.sqrt(m[1] / (1 - beta2**step)) + eps)
    update = r + weight_decay * w
    w_norm, update_norm = np.linalg.norm(w), np.linalg.norm(update)
    trust = w_norm / update_norm if w_norm > 0 and update_norm > 0 else 1.0
    w -= lr * trust * update


#: The optimizers that torch does not have: the formula, and the default learning rate.
PAPERS = {"lion": (lion, 1e-4), "lamb": (lamb, 1e-3)}


def run_paper(hyperparameters):
    options = dict(hyperparameters)
    rule, lr = PAPERS[options.pop("name")]
    lr = options.pop("lr", lr)
    sign = -1 if options.pop("maximize", False) else 1
    parameters = [values(t, 0, size).astype(np.float64) for t, size in enumerate(SIZES)]
    moments = [[np.zeros_like(w), np.zeros_like(w)] for w in parameters]
    for step in range(1, STEPS + 1):
        for t, (w, m) in enumerate(zip(parameters, moments)):
            gradient = sign * values(t, step, len(w)).astype(np.float64)
            rule(w, m, gradient, step, lr * LR_FACTORS[(step - 1) % len(LR_FACTORS)], **options)
        if step in RECORDED:
            yield [w.astype(np.float32) for w in parameters]


@contextlib.contextmanager
def nearest_square_roots():
    """torch with a correctly rounded square root."""
    sqrt, sqrt_ = torch.Tensor.sqrt, torch.Tensor.sqrt_
    torch.Tensor.sqrt = lambda self: sqrt(self.double()).to(self.dtype)
    torch.Tensor.sqrt_ = lambda self: self.copy_(self.sqrt())
    yield
    torch.Tensor.sqrt, torch.Tensor.sqrt_ = sqrt, sqrt_


def checksum(vectors):
    """FNV-1a of 64 bits over the parameters' bits, one u32 at a time."""
    state = 0xCBF29CE484222325
    for bits in np.concatenate(vectors).view(np.uint32):
        state = (state ^ int(bits)) * 0x100000001B3 % 2**64
    return f"{state:016x}"


def flat(recorded):
    return [tensor for parameters in recorded for tensor in parameters]


def main():
    torch.set_num_threads(1)
    vectors, cases = [], []
    for case, hyperparameters, *shapes in CASES:
        entry = {"case": case, "optimizer": hyperparameters}
        if shapes:
            entry["shapes"] = shapes[0]
        shapes = shapes[0] if shapes else [[size] for size in SIZES]
        if hyperparameters["name"] in PAPERS:
            vectors += flat(run_paper(hyperparameters))
        else:
            vectors += flat(run_torch(hyperparameters, shapes))
        if hyperparameters["name"] not in (*PAPERS, "adafactor"):
            with nearest_square_roots():
                entry["checksum"] = checksum(flat(run_torch(hyperparameters, shapes)))
        cases.append(entry)
    reference = {"torch": torch.__version__.split("+")[0], "tolerances": TOLERANCES}
    write("cases.json", "vectors.f32", reference, cases, vectors)


if __name__ == "__main__":
    main()
