//! The floor of a step of ZeroShard: the time without synchronisation, and the time that the bytes
//! which must move need on this machine, measured in the same run.

use std::{thread, time::Instant};

use zeroshard_client::{Transport, Wire};

use super::{Error, Level};
use crate::{sample::median, transfer::raw_rate};

/// The bytes of a measured transfer, which do not fit in the caches.
const BYTES: usize = 128 << 20;

/// Bytes per second, a sample for each round.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Of one TCP stream.
    tcp: Vec<f64>,
    /// Of copies, with a thread for each rank.
    memory: Vec<f64>,
}

impl Rates {
    /// Takes samples. `ranks`: the number of ranks, which share the machine.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn measure(&mut self, ranks: usize) -> Result<(), Error> {
        self.tcp.push(raw_rate(BYTES)?);
        self.memory.push(copy_rate(ranks));
        Ok(())
    }

    /// The seconds in which the ranks move what a step moves; `None` without samples.
    pub(super) fn seconds(&self, bytes: u64, transport: Transport) -> Option<f64> {
        let rates = match transport {
            Transport::Shm => &self.memory,
            _ => &self.tcp,
        };
        (!rates.is_empty()).then(|| bytes as f64 / median(rates.clone()))
    }
}

/// The bytes that a rank moves in a step of a model of `params` parameters, whose gradients and
/// parameters have these encodings. It pushes each gradient, and pulls each parameter: at `p_g_os`
/// for forward and once more for backward. Over shared memory, a gradient is copied, and parameters
/// are where the servers have them.
pub(super) fn bytes(
    level: Level,
    transport: Transport,
    (gradients, parameters): (Wire, Wire),
    params: u64,
) -> u64 {
    let pulls = match (transport, level) {
        (Transport::Shm, _) => 0,
        (_, Level::Os | Level::OsG) => 1,
        (_, Level::PGOs) => 2,
    };
    (gradients.bytes(params as usize) + pulls * parameters.bytes(params as usize)) as u64
}

/// The bytes that `threads` threads copy in a second.
fn copy_rate(threads: usize) -> f64 {
    let mut arrays: Vec<_> = (0..threads).map(|_| (vec![1u8; BYTES], vec![0u8; BYTES])).collect();
    let mut copy = || {
        let began = Instant::now();
        thread::scope(|scope| {
            for (from, to) in &mut arrays {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        began.elapsed().as_secs_f64()
    };
    copy(); // memory is accessed for the first time
    let seconds = copy();
    std::hint::black_box(&arrays);
    (threads * BYTES) as f64 / seconds
}

#[cfg(test)]
mod tests {
    use zeroshard_model::DType;

    use super::*;

    #[test]
    fn a_step_moves_gradients_once_and_parameters_as_often_as_they_are_pulled() {
        const PARAMS: u64 = 64 << 20;
        let f32 = Wire::from(DType::F32);
        let of = |level, transport, wires| bytes(level, transport, wires, PARAMS) / PARAMS;
        assert_eq!(of(Level::Os, Transport::Grpc, (f32, f32)), 8);
        assert_eq!(of(Level::PGOs, Transport::Grpc, (f32, f32)), 12);
        assert_eq!(of(Level::OsG, Transport::Grpc, (Wire::Int8, f32)), 5);
        assert_eq!(of(Level::PGOs, Transport::Shm, (f32, f32)), 4);
    }
}
