"""Makes the golden vectors that the int8 encoding of the wire is tested against: int8.json, beside
this file.

    pip install numpy && python int8.py

The model is written from the definition (proto/loops/src/int8.rs) in integers and float64, without
the tricks of the Rust code. float64 holds a quotient of two float32 numbers precisely enough that
rounding it to float32 gives the quotient of float32, and all products of powers of two are exact.
"""

import json
import pathlib

import numpy as np

TILE = 128
FRACTION = 23
MIN_SCALE = float(np.finfo(np.float32).tiny)
MASK = 0xFFFFFFFF


def splitmix(state: int) -> int:
    """SplitMix64's next output."""
    mixed = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """A block of Philox4x32-10, as in figure 2 of its paper."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        of_a, of_c = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (of_c >> 32) ^ b ^ low, of_c & MASK, (of_a >> 32) ^ d ^ high, of_a & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return [a, b, c, d]


def random(case: dict[str, int], element: int) -> int:
    """The 32 random bits of an element of the tensor."""
    key = splitmix((splitmix(case["seed"]) + case["step"]) % 2**64)
    tile, inside = divmod(element, TILE)
    number = tile * 32 + inside % 32
    counter = [number & MASK, number >> 32, case["tensor"], case["rank"]]
    return philox(counter, [key & MASK, key >> 32])[inside // 32]


def encode(case: dict[str, int], values: np.ndarray) -> bytes:
    encoded = b""
    for at in range(0, len(values), TILE):
        tile = values[at : at + TILE].astype(np.float64)
        if not np.isfinite(tile).all():
            markers = {np.inf: 127, -np.inf: -127}
            elements = [-128 if np.isnan(x) else markers.get(x, 0) for x in tile]
            scale = np.float32(np.inf)
        else:
            scale = np.float32(max(np.float32(np.abs(tile).max() / 127), MIN_SCALE))
            if not np.isfinite(np.float32(float(scale) * 127)):
                scale = np.nextafter(scale, np.float32(0))
            elements = []
            for position, x in enumerate(tile):
                quotient = float(np.float32(x / float(scale)))
                fixed = round(quotient * 2**FRACTION)  # ties to even
                drawn = random(case, case["first"] + at + position) >> (32 - FRACTION)
                elements.append(max(-127, min(127, (fixed + drawn) // 2**FRACTION)))
        encoded += np.float32(scale).tobytes() + np.array(elements, np.int8).tobytes()
    return encoded


def inputs() -> list[np.ndarray]:
    """The values of the cases: of one size, of many sizes, and the borders of f32."""
    numbers = np.random.Generator(np.random.PCG64(34))
    normal = numbers.standard_normal(300).astype(np.float32)
    spread = (normal * 2.0 ** numbers.integers(-140, 120, 300)).astype(np.float32)
    tiny = (normal * np.float32(1e-40)).astype(np.float32)
    huge = np.full(130, np.finfo(np.float32).max, np.float32)
    huge[1::2] = -3.0e38
    zeros = np.zeros(5, np.float32)
    zeros[1] = -0.0
    broken = normal[:260].copy()
    broken[[3, 130, 131, 259]] = [np.inf, -np.inf, np.nan, np.nan]
    one = np.array([-1.0], np.float32)
    return [normal, spread, tiny, huge, zeros, broken, one]


def main() -> None:
    cases = []
    for number, values in enumerate(inputs()):
        case = {
            "seed": [0, 1, 2**64 - 1][number % 3],
            "step": [0, 7, 2**63][number % 3],
            "rank": [0, 2**32 - 1, 5][number % 3],
            "tensor": [0, 3, 2**31][number % 3],
            "first": [0, 65536, 2**40][number % 3],
        }
        encoded = encode(case, values)
        cases.append({**case, "values": values.tobytes().hex(), "bytes": encoded.hex()})
    path = pathlib.Path(__file__).with_name("int8.json")
    path.write_text(json.dumps(cases, indent=1) + "\n")


main()
