"""The trainings whose results are golden vectors, and the files that hold them.

Each case runs STEPS steps over tensors of SIZES elements with a changing learning rate. Gradients
and initial parameters come from an integer hash, so that the tests make the same ones and only
results are stored: a file of vectors holds, for each case, for each of RECORDED steps, for each
tensor, the parameters as little-endian f32.
"""

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
SIZES = [1, 7, 1003]
STEPS = 50
RECORDED = [10, 50]
LR_FACTORS = [1.0, 0.5, 2.0, 0.25]


def hashed(tensor, step, size):
    """One u32 an element: the finaliser `lowbias32` over element, step and tensor."""
    i = np.arange(size, dtype=np.uint32)
    x = i ^ np.uint32(step * 0x9E3779B1 & 0xFFFFFFFF) ^ np.uint32(tensor * 0x85EBCA77 & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def values(tensor, step, size):
    """Mostly in -1..1; of sixteen neighbours one is zero, one subnormal, one about 2^40 and one
    about 2^-40.

    Step 0 gives the initial parameters. Their special elements are others than the gradients', and
    their large ones are about 2^10: LAMB moves every element by a share of the tensor's norm.
    """
    h = hashed(tensor, step, size)
    kind = (np.arange(size) + 4 + 12 * tensor + (8 if step == 0 else 0)) % 16
    signed = (h >> np.uint32(8)).astype(np.int32) - (1 << 23)
    normal = signed.astype(np.float32) * np.float32(2.0**-23)
    subnormal = (h & np.uint32(0x807FFFFF)).view(np.float32)
    large = normal * np.float32(2.0 ** (10 if step == 0 else 40))
    special = [np.zeros(size, np.float32), subnormal, large, normal * np.float32(2.0**-40)]
    return np.select([kind == k for k in range(4)], special, normal)


def write(index_name, vectors_name, reference, cases, vectors):
    """Writes the index of the cases and their vectors. `reference` names the reference and its
    version, and has the tolerance of each optimizer."""
    np.concatenate(vectors).astype("<f4").tofile(HERE / vectors_name)
    index = {
        **reference,
        "sizes": SIZES,
        "steps": STEPS,
        "recorded": RECORDED,
        "lr_factors": LR_FACTORS,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in index.items()]
    cases = ",\n".join(json.dumps(case) for case in cases)
    text = "{\n" + "".join(lines) + '"cases": [\n' + cases + "\n]\n}\n"
    (HERE / index_name).write_text(text)
