//! Runs operations of streams on the memory of the device.

use std::{sync::Arc, time::Instant};

use super::{Device, Work, queue::Operation};
use crate::{
    codes::{Code, ILLEGAL_ADDRESS, MISALIGNED_ADDRESS},
    compiled,
    fault::{Fault, Kind},
    memory::windows::Windows,
    order::Stamp,
};

impl Device {
    /// Runs an operation.
    pub(super) fn run(&mut self, operation: Operation) -> Result<(), Code> {
        let Operation { stamp, work, fails } = operation;
        if let Some(code) = fails {
            return Err(code);
        }
        let done = self.work(&work, &stamp);
        self.report_races();
        done.map_err(|fault| {
            let what = format!("{}: {}", stamp.name, fault.what);
            self.report(&Fault { kind: fault.kind, what });
            match fault.kind {
                Kind::Misaligned => MISALIGNED_ADDRESS,
                _ => ILLEGAL_ADDRESS,
            }
        })
    }

    fn work(&mut self, work: &Work, stamp: &Arc<Stamp>) -> Result<(), Fault> {
        match work {
            Work::Allocate(base) => self.memory.allocate(*base, stamp),
            Work::Free(base) => self.memory.free(*base, stamp)?,
            Work::Set { to, pattern, count } => {
                let size = (pattern.len() * count) as u64;
                let bytes = self.memory.touch(*to, size, true, stamp)?;
                match **pattern {
                    // Otherwise most of the time of a server would be spent here.
                    [byte] => bytes.fill(byte),
                    _ => bytes
                        .chunks_exact_mut(pattern.len())
                        .for_each(|at| at.copy_from_slice(pattern)),
                }
            }
            Work::Upload { to, from, size } => {
                let to = self.memory.touch(*to, *size as u64, true, stamp)?;
                let faults = self.pinned.end(from, stamp, to);
                faults.iter().for_each(|fault| self.report(fault));
            }
            Work::Download { to, from, size } => {
                let from = self.memory.touch(*from, *size as u64, false, stamp)?;
                let faults = self.pinned.end(to, stamp, from);
                faults.iter().for_each(|fault| self.report(fault));
            }
            Work::Copy { to, from, size } => {
                let bytes = self.memory.touch(*from, *size as u64, false, stamp)?.to_vec();
                self.memory.touch(*to, *size as u64, true, stamp)?.copy_from_slice(&bytes);
            }
            Work::Launch(launch) => {
                let start = Instant::now();
                match compiled::library() {
                    Some(library) => launch.run_compiled(library, &mut self.memory, stamp)?,
                    None => {
                        let mut windows = Windows::new(&mut self.memory, launch.kernel.sites);
                        let instructions = launch.run(&mut windows, &mut self.random)?;
                        windows.finish(stamp);
                        self.figures.instructions += instructions;
                    }
                }
                self.figures.nanoseconds += start.elapsed().as_nanos() as u64;
            }
            Work::Record(mark) => mark.come(self.figures.nanoseconds),
            Work::Wait(_) => {}
            Work::Send { from, size, message } => {
                message.write(self.memory.touch(*from, *size as u64, false, stamp)?);
            }
            Work::Receive { to, size, message } => {
                if let Some(bytes) = message.read(*size)? {
                    self.memory.touch(*to, *size as u64, true, stamp)?.copy_from_slice(&bytes);
                }
            }
        }
        Ok(())
    }
}
