//! The speed at which one core encodes and decodes what goes over the wire, compared with copying
//! the same f32 elements.
//!
//! The elements are in the cache, as when a part of a message is encoded before it is sent. Every
//! repetition measures the copy again, directly before the encoding.

use std::num::NonZero;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use zeroshard_client::Wire;
use zeroshard_loops::{
    Level,
    convert::cast,
    int8::{self, Rounding},
};
use zeroshard_model::DType;

use crate::{Error, sample::median, table::Table};

/// Measure encoding f32 for the wire, and decoding it, on one core, with each instruction set of
/// the machine, in nanoseconds for an element, beside copying an element
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of elements that are encoded at a time. A message has 1 MiB by default
    #[arg(long, default_value = "262144")]
    elements: NonZero<usize>,
    /// Number of repetitions; the median is shown
    #[arg(long, default_value = "101")]
    repeat: NonZero<usize>,
}

/// The arrays of a measurement.
struct Arrays {
    /// f32, and what is decoded.
    values: Vec<u8>,
    decoded: Vec<u8>,
    encoded: Vec<u8>,
}

/// Runs the benchmark and prints its lines.
pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = ["wire", "instructions", "encode_ns", "decode_ns", "copy_ns"];
    let mut table = Table::new(json, &fields);
    let elements = options.elements.get();
    let values = (0..elements).flat_map(|i| (i as f32 * 0.37).sin().to_le_bytes()).collect();
    let mut arrays = Arrays { values, decoded: vec![0; elements * 4], encoded: Vec::new() };
    let wires = Wire::ALL.into_iter().filter(|wire| *wire != DType::F32.into());
    for (wire, level) in wires.flat_map(|wire| Level::all().into_iter().map(move |of| (wire, of))) {
        arrays.encoded.resize(wire.bytes(elements), 0);
        let times = (0..options.repeat.get()).map(|_| {
            let copy = seconds(|| arrays.decoded.copy_from_slice(&arrays.values));
            let encode = seconds(|| arrays.encode(wire, level));
            [encode, seconds(|| arrays.decode(wire, level)), copy]
        });
        let times: Vec<_> = times.collect();
        let of = |what: usize| {
            median(times.iter().map(|times| times[what]).collect()) / elements as f64 * 1e9
        };
        let instructions = format!("{:?}", level.isa()).to_lowercase();
        table.row(json!({
            "bench": "wire", "wire": wire.to_string(), "instructions": instructions,
            "encode_ns": of(0), "decode_ns": of(1), "copy_ns": of(2),
        }));
    }
    table.finish();
    Ok(())
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

impl Arrays {
    fn encode(&mut self, wire: Wire, level: Level) {
        let Self { values, encoded, .. } = self;
        match wire {
            Wire::Plain(dtype) => _ = cast(level, values, DType::F32, encoded, dtype),
            Wire::Int8 => {
                let rounding = Rounding::of_gradient(0, 0, 0, 0);
                int8::encode(level, values, DType::F32, 0, &rounding, encoded);
            }
        }
    }

    fn decode(&mut self, wire: Wire, level: Level) {
        let Self { decoded, encoded, .. } = self;
        match wire {
            Wire::Plain(dtype) => _ = cast(level, encoded, dtype, decoded, DType::F32),
            Wire::Int8 => int8::decode(level, encoded, decoded, DType::F32),
        }
    }
}
