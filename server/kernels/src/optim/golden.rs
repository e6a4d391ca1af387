//! Tests of the optimizers with golden vectors, which `make.py`, `make_paddle.py` and
//! `make_state_int8.py` in `tests/golden` create.
//!
//! SGD, ASGD and Adamax equal torch bit for bit. The other optimizers use square roots, which torch
//! does not always round to nearest: they equal unmodified torch within a tolerance, and torch with
//! correctly rounded square roots bit for bit. Paddle's arithmetic is met within a tolerance.
//! With 8-bit state, every bit equals that of a model whose rounding is in float64.

use std::sync::Arc;

use serde_json::Value;
use zeroshard_model::{
    dtype::DType,
    optimizer::{AppliedSteps, Optimizer, StateDType},
};

use super::initial_state;
use crate::{Backend, Cpu, Position, Update};

/// The index and the vectors of torch's optimizers, of Paddle's, and of those with 8-bit state.
const GOLDEN: [(&str, &[u8]); 3] = [
    (
        include_str!("../../../../tests/golden/cases.json"),
        include_bytes!("../../../../tests/golden/vectors.f32"),
    ),
    (
        include_str!("../../../../tests/golden/paddle.json"),
        include_bytes!("../../../../tests/golden/paddle.f32"),
    ),
    (
        include_str!("../../../../tests/golden/state_int8.json"),
        include_bytes!("../../../../tests/golden/state_int8.f32"),
    ),
];

/// The same hash as in inputs.py.
fn hashed(tensor: u32, step: u32, element: u32) -> u32 {
    let mut x = element ^ step.wrapping_mul(0x9E37_79B1) ^ tensor.wrapping_mul(0x85EB_CA77);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7FEB_352D);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// The same values as in inputs.py: gradients, or at step 0 the initial parameters.
fn values(tensor: u32, step: u32, size: usize) -> Vec<f32> {
    let value = |element: u32| {
        let h = hashed(tensor, step, element);
        let kind = (element + 4 + 12 * tensor + if step == 0 { 8 } else { 0 }) % 16;
        let normal = ((h >> 8) as i32 - (1 << 23)) as f32 * 2f32.powi(-23);
        match kind {
            0 => 0.0,
            1 => f32::from_bits(h & 0x807F_FFFF),
            2 => normal * 2f32.powi(if step == 0 { 10 } else { 40 }),
            3 => normal * 2f32.powi(-40),
            _ => normal,
        }
    };
    (0..size as u32).map(value).collect()
}

fn buffer<B: Backend>(backend: &B, values: &[f32]) -> B::Buffer {
    let mut buffer = backend.allocate(DType::F32, values.len()).unwrap();
    backend.store(&mut buffer, 0..values.len(), bytemuck::cast_slice(values), DType::F32).unwrap();
    buffer
}

/// A tensor's parameters after each of the recorded steps.
fn run<B: Backend>(backend: &B, index: &Index, case: &Case, tensor: usize) -> Vec<Vec<f32>> {
    let size = index.sizes[tensor];
    let mut master = buffer(backend, &values(tensor as u32, 0, size));
    let shape = match &case.shapes {
        None => vec![size as u64],
        Some(shapes) => shapes[tensor].clone(),
    };
    let mut state = match index.state_dtype {
        StateDType::F32 => initial_state(backend, &case.optimizer, &shape, size).unwrap(),
        StateDType::Int8 => {
            let codes = case.optimizer.state_codes().unwrap().iter();
            codes.map(|&code| backend.allocate_coded(code, size).unwrap()).collect()
        }
    };
    let mut applied = AppliedSteps::default();
    let mut recorded = Vec::new();
    for step in 1..=index.steps {
        let mut optimizer = case.optimizer;
        let factor = index.lr_factors[(step - 1) % index.lr_factors.len()];
        optimizer.set_lr(optimizer.lr().unwrap_or_default() * factor);
        let mut gradient = values(tensor as u32, step as u32, size);
        if case.shapes.is_some() || index.state_dtype == StateDType::Int8 {
            gradient.iter_mut().for_each(|value| *value = value.clamp(-1.0, 1.0));
        }
        let gradient = buffer(backend, &gradient);
        let at = Position { tensor: tensor as u64, element: 0 };
        let update = Update { at, ..Update::after(applied, &optimizer, 1.0) };
        applied = update.applied();
        let states = state.iter_mut().map(Into::into).collect();
        backend.apply(&update, (&mut master).into(), states, Some(&gradient), None, None).unwrap();
        if index.recorded.contains(&step) {
            let shared = Arc::new(master);
            let bytes = backend.read(&shared, 0..size, DType::F32).unwrap();
            recorded.push(floats(&bytes));
            drop(bytes);
            master = Arc::into_inner(shared).unwrap();
        }
    }
    recorded
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (raw, torn) = bytes.as_chunks();
    assert!(torn.is_empty());
    raw.iter().map(|&raw| f32::from_le_bytes(raw)).collect()
}

/// The contents of cases.json or paddle.json.
struct Index {
    /// The reference implementation and its version.
    reference: String,
    state_dtype: StateDType,
    sizes: Vec<usize>,
    steps: usize,
    recorded: Vec<usize>,
    lr_factors: Vec<f64>,
    cases: Vec<Case>,
}

pub(crate) struct Case {
    name: String,
    pub(crate) optimizer: Optimizer,
    /// The tolerance of a parameter relative to its golden value or to 1, whichever is larger. 0
    /// requires equal bits.
    tolerance: f64,
    /// The shapes of the tensors, whose gradients are then limited to -1..1; none: vectors.
    shapes: Option<Vec<Vec<u64>>>,
    /// The checksum of the parameters of torch with correctly rounded square roots; none where the
    /// reference is in float64, or Paddle.
    checksum: Option<String>,
}

impl Index {
    fn read(json: &str) -> Index {
        let json: Value = serde_json::from_str(json).unwrap();
        let case = |case: &Value| Case {
            name: case["case"].as_str().unwrap().to_owned(),
            optimizer: serde_json::from_value(case["optimizer"].clone()).unwrap(),
            tolerance: json["tolerances"][case["optimizer"]["name"].as_str().unwrap()]
                .as_f64()
                .unwrap(),
            shapes: serde_json::from_value(case["shapes"].clone()).unwrap(),
            checksum: case["checksum"].as_str().map(str::to_owned),
        };
        let sizes =
            |key: &str| -> Vec<usize> { serde_json::from_value(json[key].clone()).unwrap() };
        Index {
            state_dtype: json["state_dtype"].as_str().map_or(StateDType::F32, |name| {
                name.parse().expect("the script writes a dtype of optimizer state")
            }),
            reference: ["torch", "paddle", "numpy"]
                .iter()
                .find_map(|name| Some(format!("{name} {}", json[name].as_str()?)))
                .unwrap(),
            sizes: sizes("sizes"),
            steps: json["steps"].as_u64().unwrap() as usize,
            recorded: sizes("recorded"),
            lr_factors: serde_json::from_value(json["lr_factors"].clone()).unwrap(),
            cases: json["cases"].as_array().unwrap().iter().map(case).collect(),
        }
    }
}

/// The comparison of a case's parameters.
struct Comparison {
    values: usize,
    other_bits: usize,
    worst: f64,
    checksum: u64,
}

impl Comparison {
    fn new() -> Comparison {
        Comparison { values: 0, other_bits: 0, worst: 0.0, checksum: 0xCBF2_9CE4_8422_2325 }
    }

    fn add(&mut self, ours: f32, golden: f32) {
        let error = (f64::from(ours) - f64::from(golden)).abs() / f64::from(golden.abs().max(1.0));
        assert!(!error.is_nan(), "golden vectors have no infinities nor NaN");
        self.worst = self.worst.max(error);
        self.other_bits += usize::from(ours.to_bits() != golden.to_bits());
        self.values += 1;
        self.checksum ^= u64::from(ours.to_bits());
        self.checksum = self.checksum.wrapping_mul(0x100_0000_01B3);
    }

    /// Prints one line of the table, and returns whether the case passes.
    fn report(self, case: &Case) -> bool {
        let Comparison { values, other_bits, worst, checksum } = self;
        let tolerance = case.tolerance;
        let rounded =
            case.checksum.as_ref().map(|expected| *expected == format!("{checksum:016x}"));
        let yes_or_no = |yes| if yes { "yes" } else { "no" };
        let share = format!("{other_bits}/{values}");
        let bitwise = yes_or_no(other_bits == 0);
        let rounded_bitwise = rounded.map_or("-", yes_or_no);
        let name = &case.name;
        println!(
            "{name:<34}{bitwise:>8}{share:>12}{worst:>10.1e}{tolerance:>10.0e}{rounded_bitwise:>15}"
        );
        worst <= tolerance && (tolerance > 0.0 || other_bits == 0) && rounded != Some(false)
    }
}

// promise: same-bits
#[test]
fn every_optimizer_equals_its_golden_vectors() {
    assert_equal(&Cpu::new());
}

/// The cases of all golden vectors.
pub(crate) fn cases() -> impl Iterator<Item = Case> {
    GOLDEN.into_iter().flat_map(|(json, _)| Index::read(json).cases)
}

/// Compares the steps of a backend with all golden vectors.
pub(crate) fn assert_equal<B: Backend>(backend: &B) {
    let mut failed = Vec::new();
    for (json, vectors) in GOLDEN {
        failed.extend(compare(backend, &Index::read(json), vectors));
    }
    assert!(failed.is_empty(), "not equal: {failed:?}");
}

/// Compares all cases of an index, prints the results as a table, and returns the cases that fail.
fn compare<B: Backend>(backend: &B, index: &Index, vectors: &[u8]) -> Vec<String> {
    let mut golden = floats(vectors).into_iter();
    let mut failed = Vec::new();
    println!("against {} (without \"rounded sqrt\": in float64)", index.reference);
    println!(
        "{:<34}{:>8}{:>12}{:>10}{:>10}{:>15}",
        "case", "bitwise", "other bits", "worst", "allowed", "rounded sqrt"
    );
    for case in &index.cases {
        case.optimizer.validate().unwrap();
        let run = |tensor| run(backend, index, case, tensor);
        let runs: Vec<_> = (0..index.sizes.len()).map(run).collect();
        let mut comparison = Comparison::new();
        for recorded in 0..index.recorded.len() {
            for &ours in runs.iter().flat_map(|run| &run[recorded]) {
                comparison.add(ours, golden.next().unwrap());
            }
        }
        if !comparison.report(case) {
            failed.push(case.name.clone());
        }
    }
    assert_eq!(golden.next(), None, "every vector was compared");
    failed
}
