"""Makes the golden vectors of Paddle's optimizers whose formulas differ from torch's: paddle.json
and paddle.f32, beside this file.

    pip install paddlepaddle numpy && python make_paddle.py

Each case is a training as inputs.py describes it. Its settings are those of the servers. Paddle
computes powers of beta in f32 from step to step and orders its operations differently, so the
results are met within a tolerance.
"""

import paddle
from inputs import LR_FACTORS, RECORDED, SIZES, STEPS, values, write

CASES = [
    ("rmsprop", {"name": "rmsprop", "lr": 0.01, "eps": 1e-6, "paddle": True}),
    (
        "rmsprop momentum",
        {"name": "rmsprop", "lr": 0.01, "alpha": 0.9, "eps": 1e-4, "momentum": 0.9, "paddle": True},
    ),
    (
        "rmsprop centered",
        {"name": "rmsprop", "lr": 0.01, "eps": 1e-2, "centered": True, "paddle": True},
    ),
    (
        "rmsprop centered momentum",
        {
            "name": "rmsprop",
            "lr": 0.01,
            "eps": 1e-2,
            "momentum": 0.5,
            "centered": True,
            "weight_decay": 0.01,
            "paddle": True,
        },
    ),
    ("adamax", {"name": "adamax", "lr": 0.002, "paddle": True}),
    (
        "adamax large eps",
        {"name": "adamax", "lr": 0.01, "eps": 0.1, "weight_decay": 0.01, "paddle": True},
    ),
    ("nadam", {"name": "nadam", "lr": 0.002, "paddle": True}),
    (
        "nadam weight_decay",
        {
            "name": "nadam",
            "lr": 0.01,
            "beta1": 0.8,
            "momentum_decay": 0.1,
            "weight_decay": 0.1,
            "paddle": True,
        },
    ),
]

#: As in make.py. Paddle computes powers of beta in f32, from step to step.
TOLERANCES = {"rmsprop": 1e-6, "adamax": 1e-7, "nadam": 1e-6}

KINDS = {
    "rmsprop": paddle.optimizer.RMSProp,
    "adamax": paddle.optimizer.Adamax,
    "nadam": paddle.optimizer.NAdam,
}

#: Paddle's names of the servers' hyperparameters, where they differ.
NAMES = {"alpha": "rho", "eps": "epsilon"}


def run(settings):
    """The parameters after each recorded step."""
    options = {NAMES.get(key, key): value for key, value in settings.items() if key != "paddle"}
    kind, lr = KINDS[options.pop("name")], options.pop("lr")
    if kind is paddle.optimizer.RMSProp:
        options.setdefault("rho", 0.99)
    parameters = [
        paddle.create_parameter(
            [size],
            "float32",
            attr=paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(values(t, 0, size))),
        )
        for t, size in enumerate(SIZES)
    ]
    optimizer = kind(lr, parameters=parameters, **options)
    for step in range(1, STEPS + 1):
        optimizer.set_lr(lr * LR_FACTORS[(step - 1) % len(LR_FACTORS)])
        for t, parameter in enumerate(parameters):
            parameter.grad = paddle.to_tensor(values(t, step, SIZES[t]))
        optimizer.step()
        if step in RECORDED:
            yield from (parameter.numpy().copy() for parameter in parameters)


def main():
    vectors = [tensor for _, settings in CASES for tensor in run(settings)]
    cases = [{"case": f"Paddle {case}", "optimizer": settings} for case, settings in CASES]
    reference = {"paddle": paddle.__version__, "tolerances": TOLERANCES}
    write("paddle.json", "paddle.f32", reference, cases, vectors)


if __name__ == "__main__":
    main()
