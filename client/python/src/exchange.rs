//! The exchange of gradients and parameters in a group of ranks: what each rank sends, and what
//! becomes of it. The framework's process group transfers it.
//!
//! Messages consist of whole words of 4 bytes. A message with gradients begins with one word for
//! each tensor, which is 0 if the sender has no gradient of it. The message with the parameters
//! that a rank has pulled is the same for all ranks if they hold the same elements of each tensor.

use pyo3::prelude::*;
use zeroshard_client as client;
use zeroshard_model::{DType, Error, Result};

use crate::{
    array::{Array, Lent, Targets, tensor_data},
    error::raise,
};

const WORD: usize = 4;

/// The division of some tensors among the ranks of a group.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Exchange {
    pub(crate) exchange: client::Exchange,
    /// The dtype of gradients in messages.
    gradients: DType,
    /// The dtype of parameters in messages.
    parameters: DType,
}

impl Exchange {
    /// The exchange of `job`, of which each message has values as its encodings decode them.
    pub(crate) fn new(exchange: client::Exchange, job: &client::Job) -> Self {
        let (gradients, parameters) = (job.wire().decoded(), job.parameter_wire().decoded());
        Self { exchange, gradients, parameters }
    }

    /// The words of a message with parameters.
    fn words_of(&self, numel: usize) -> usize {
        (numel * self.parameters.size()).div_ceil(WORD)
    }

    /// The words of a message with gradients.
    fn message(&self, numel: usize) -> usize {
        self.exchange.tensors().len() + (numel * self.gradients.size()).div_ceil(WORD)
    }

    /// Writes the messages with gradients to all ranks, one after the other.
    fn write(&self, gradients: &[Option<client::Values>], mut into: &mut [u8]) -> Result<()> {
        for rank in self.exchange.group() {
            let packed = self.exchange.pack(gradients, self.gradients, rank)?;
            let words = self.message(self.exchange.sent_to(rank));
            let (message, rest) = into
                .split_at_mut_checked(words * WORD)
                .ok_or_else(|| too_small("arrays for gradients", words))?;
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
            received.push(&values[..numel * self.gradients.size()]);
        }
        Ok((self.exchange.add(&received, self.gradients)?, present))
    }

    /// Writes the messages with parameters to all ranks, one after the other.
    fn write_parts(&self, part: &[u8], mut into: &mut [u8]) -> Result<()> {
        let mut packed = Vec::new();
        for rank in self.exchange.group() {
            let words = self.words_of(self.exchange.part_for(rank));
            let (message, rest) = into
                .split_at_mut_checked(words * WORD)
                .ok_or_else(|| too_small("arrays for parameters", words))?;
            into = rest;
            packed.clear();
            self.exchange.pack_part(part, self.parameters, rank, &mut packed)?;
            message[..packed.len()].copy_from_slice(&packed);
        }
        Ok(())
    }

    /// Copies the parameters in the messages from all ranks to the tensors.
    fn copy(&self, mut messages: &[u8], targets: &mut [client::Target<'_>]) -> Result<()> {
        for (rank, words) in self.exchange.group().zip(self.taken_words()) {
            let (message, rest) = messages
                .split_at_checked(words * WORD)
                .ok_or_else(|| too_small("received parameters", words))?;
            messages = rest;
            for piece in self.exchange.split(rank, message, self.parameters) {
                let (piece, values) = piece?;
                let target = &mut targets[piece.tensor];
                target.data.fill(piece.elements.clone(), values, self.parameters)?;
            }
        }
        Ok(())
    }

    /// The beginning of a part of memory, for the pieces of this rank.
    pub(crate) fn own_slots<'a>(&self, part: &'a mut Lent) -> Result<client::Slots<'a>> {
        let numel = self.exchange.part_len();
        let slots = part.bytes_mut().get_mut(..numel * self.parameters.size());
        let slots = slots.ok_or_else(|| too_small("arrays for pieces", self.words_of(numel)))?;
        client::Slots::new(slots, self.parameters)
    }
}

fn too_small(what: &str, words: usize) -> Error {
    Error::refused(format!("the {what} end before a message of {words} words"))
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
    fn is_whole(&self) -> bool {
        self.exchange.is_whole()
    }

    #[getter]
    fn part_words(&self) -> usize {
        match self.exchange.is_whole() {
            true => self.taken_words()[0],
            false => self.words_of(self.exchange.part_len()),
        }
    }

    #[getter]
    fn given_words(&self) -> Vec<usize> {
        let words = |rank| self.words_of(self.exchange.part_for(rank));
        self.exchange.group().map(words).collect()
    }

    #[getter]
    fn taken_words(&self) -> Vec<usize> {
        let words = |rank| self.words_of(self.exchange.part_from(rank));
        let words: Vec<_> = self.exchange.group().map(words).collect();
        match self.exchange.is_whole() {
            // The parts are gathered, and have the size of the largest.
            true => vec![words.iter().copied().max().unwrap_or_default(); words.len()],
            false => words,
        }
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

    fn pack_part(
        &self,
        py: Python<'_>,
        part: PyRef<'_, Array>,
        into: PyRef<'_, Array>,
    ) -> PyResult<()> {
        let (part, mut into) = (Lent::new(py, &part)?, Lent::new(py, &into)?);
        py.detach(|| self.write_parts(part.as_ref(), into.bytes_mut())).map_err(raise)
    }

    fn place(
        &self,
        py: Python<'_>,
        messages: PyRef<'_, Array>,
        arrays: Vec<PyRef<'_, Array>>,
    ) -> PyResult<()> {
        let messages = Lent::new(py, &messages)?;
        let mut targets = Targets::new(py, &arrays.into_iter().map(|array| (0, array)).collect());
        py.detach(|| self.copy(messages.as_ref(), &mut targets.targets()?)).map_err(raise)
    }
}
