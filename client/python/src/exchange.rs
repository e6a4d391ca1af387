//! The exchange of gradients and parameters in a group of ranks: what each rank sends, and what
//! becomes of it. The framework's process group transfers it.
//!
//! Messages consist of whole words of 4 bytes. A message with gradients begins with one word for
//! each tensor, which is 0 if the sender has no gradient of it.

use pyo3::prelude::*;
use zeroshard_client as client;
use zeroshard_proto::{DType, Error, Result};

use crate::{
    array::{Array, Lent, Targets, tensor_data},
    error::raise,
};

const WORD: usize = 4;

/// The division of some tensors among the ranks of a group.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Exchange {
    pub(crate) exchange: client::Exchange,
    /// The dtype of the values in messages.
    dtype: DType,
}

impl Exchange {
    pub(crate) fn new(exchange: client::Exchange, dtype: DType) -> Self {
        Self { exchange, dtype }
    }

    fn words_of(&self, numel: usize) -> usize {
        (numel * self.dtype.size()).div_ceil(WORD)
    }

    /// The words of a message with gradients.
    fn message(&self, numel: usize) -> usize {
        self.exchange.tensors().len() + self.words_of(numel)
    }

    /// Writes the messages with gradients to all ranks, one after the other.
    fn write(&self, gradients: &[Option<client::Values>], mut into: &mut [u8]) -> Result<()> {
        for rank in self.exchange.group() {
            let packed = self.exchange.pack(gradients, self.dtype, rank)?;
            let words = self.message(self.exchange.sent_to(rank));
            let (message, rest) = into
                .split_at_mut_checked(words * WORD)
                .ok_or_else(|| too_small("room for gradients", words))?;
            into = rest;
            let (flags, values) = message.split_at_mut(gradients.len() * WORD);
            for (flag, gradient) in flags.chunks_exact_mut(WORD).zip(gradients) {
                flag.copy_from_slice(&f32::from(gradient.is_some()).to_le_bytes());
            }
            values[..packed.len()].copy_from_slice(&packed);
        }
        Ok(())
    }

    /// Adds the gradients in the messages from all ranks. Returns the sums, and for each rank
    /// whether it has a gradient of each tensor.
    pub(crate) fn add(&self, mut from: &[u8]) -> Result<(client::Sums, Vec<Vec<bool>>)> {
        let (mut present, mut received) = (Vec::new(), Vec::new());
        for rank in self.exchange.group() {
            let numel = self.exchange.received_from(rank);
            let words = self.message(numel);
            let (message, rest) = from
                .split_at_checked(words * WORD)
                .ok_or_else(|| too_small("received gradients", words))?;
            from = rest;
            let (flags, values) = message.split_at(self.exchange.tensors().len() * WORD);
            present.push(flags.chunks_exact(WORD).map(|flag| flag != [0; WORD]).collect());
            received.push(&values[..numel * self.dtype.size()]);
        }
        Ok((self.exchange.add(&received, self.dtype)?, present))
    }

    /// Copies the pieces of all ranks, which are in parts of equal size, to the tensors.
    fn copy(&self, parts: &[u8], targets: &mut [client::Target<'_>]) -> Result<()> {
        let parts = parts.chunks_exact(self.part_words() * WORD);
        for (rank, part) in self.exchange.group().zip(parts) {
            for (piece, values) in self.exchange.split(rank, part, self.dtype) {
                let target = &mut targets[piece.tensor];
                target.data.fill(piece.elements.clone(), values, self.dtype)?;
            }
        }
        Ok(())
    }

    /// The beginning of a part of memory, for the pieces of this rank.
    pub(crate) fn own_slots<'a>(&self, part: &'a mut Lent) -> Result<client::Slots<'a>> {
        let numel = self.exchange.sent_to(self.exchange.rank());
        let slots = part.bytes_mut().get_mut(..numel * self.dtype.size());
        let slots = slots.ok_or_else(|| too_small("room for pieces", self.words_of(numel)))?;
        client::Slots::new(slots, self.dtype)
    }
}

fn too_small(what: &str, words: usize) -> Error {
    Error::invalid(what, "fewer words", format!("{words} words for each message"))
}

#[pymethods]
impl Exchange {
    #[getter]
    fn sent_words(&self) -> Vec<usize> {
        let words = |rank| self.message(self.exchange.sent_to(rank));
        self.exchange.group().map(words).collect()
    }

    #[getter]
    fn received_words(&self) -> Vec<usize> {
        let words = |rank| self.message(self.exchange.received_from(rank));
        self.exchange.group().map(words).collect()
    }

    #[getter]
    fn part_words(&self) -> usize {
        let words = |rank| self.words_of(self.exchange.sent_to(rank));
        self.exchange.group().map(words).max().unwrap_or_default()
    }

    fn pack(
        &self,
        py: Python<'_>,
        gradients: Vec<Option<PyRef<'_, Array>>>,
        into: PyRef<'_, Array>,
    ) -> PyResult<()> {
        let values = |gradient: Option<PyRef<'_, Array>>| {
            let Some(gradient) = gradient else { return Ok(None) };
            Ok(tensor_data(py, &vec![(0, gradient)])?.pop().map(|data| data.data))
        };
        let gradients = gradients.into_iter().map(values).collect::<PyResult<Vec<_>>>()?;
        let mut into = Lent::new(py, &into)?;
        py.detach(|| self.write(&gradients, into.bytes_mut())).map_err(raise)
    }

    fn place(
        &self,
        py: Python<'_>,
        parts: PyRef<'_, Array>,
        arrays: Vec<PyRef<'_, Array>>,
    ) -> PyResult<()> {
        let parts = Lent::new(py, &parts)?;
        let mut targets = Targets::new(py, &arrays.into_iter().map(|array| (0, array)).collect());
        py.detach(|| self.copy(parts.as_ref(), &mut targets.targets()?)).map_err(raise)
    }
}
