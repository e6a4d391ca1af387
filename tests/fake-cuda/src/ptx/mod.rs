//! PTX, the assembly of NVIDIA: the text of a module, decoded to operations on registers.
//!
//! [`parse`] splits the text into kernels and statements, [`decode`] makes [`Operation`]s of them.
//! Only the instructions that the kernels of the server use are known. Any other instruction is an
//! error when the module is loaded, so that none is ignored.

use std::collections::HashMap;

pub(crate) mod alu;
pub(crate) mod decode;
pub(crate) mod operands;
pub(crate) mod parse;

use crate::lanes::Register;
use alu::Alu;

/// The kernels of a module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) kernels: HashMap<String, Kernel>,
}

impl Module {
    /// Reads the text of a module.
    ///
    /// # Errors
    /// A description of the first statement that is not known.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let kernels = parse::kernels(text)?;
        let decoded = kernels.iter().map(|parsed| {
            let kernel = decode::kernel(parsed).map_err(|e| format!("{}: {e}", parsed.name))?;
            Ok((kernel.name.clone(), kernel))
        });
        Ok(Self { kernels: decoded.collect::<Result<_, String>>()? })
    }
}

/// A kernel, ready to run.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) operations: Vec<Operation>,
    /// The number of registers of a thread.
    pub(crate) registers: usize,
    /// Registers that keep a value for all threads: the constants of the text.
    pub(crate) constants: Vec<(Register, u64)>,
    /// Registers that keep a value for each thread, or for each block.
    pub(crate) specials: Vec<(Register, Special)>,
    /// The offset and size of each parameter.
    pub(crate) parameters: Vec<(usize, usize)>,
    /// The address and size of each array in shared memory. There are gaps between them.
    pub(crate) shared: Vec<(u64, usize)>,
    /// The number of operations that access memory.
    pub(crate) sites: usize,
}

impl Kernel {
    /// The bytes of all parameters.
    pub(crate) fn parameter_bytes(&self) -> usize {
        self.parameters.last().map_or(0, |(offset, size)| offset + size)
    }
}

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
}

/// An operation, which a thread carries out if its guard says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operation {
    /// A predicate, and the value that it must have.
    pub(crate) guard: Option<(Register, bool)>,
    pub(crate) action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Computes `to` from `from`. Registers that the operation does not need are 0.
    Compute { alu: Alu, to: Register, from: [Register; 3] },
    /// Loads a parameter of the launch.
    Parameter { to: Register, offset: usize, size: usize },
    /// Accesses memory. `site` is the number of this access in the kernel.
    Access { access: Access, space: Space, size: usize, register: Register, at: At, site: usize },
    /// Goes on at an operation.
    Branch(usize),
    /// Waits until all threads of the block have come to a barrier.
    Barrier,
    /// Ends the thread.
    Exit,
}

/// The address in a register, and an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) base: Register,
    pub(crate) offset: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Load,
    Store,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
}
