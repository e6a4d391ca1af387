//! Streams with the operations that wait in them, and events.

use std::{collections::VecDeque, sync::Arc};

use super::work::{Mark, Work};
use crate::{
    codes::Code,
    order::{Clock, Stamp},
};

/// A stream: a queue of operations.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) number: usize,
    /// What comes before the next operation.
    pub(super) clock: Clock,
    pub(super) queue: VecDeque<Operation>,
}

impl Stream {
    pub(super) fn new(number: usize) -> Self {
        Self { number, clock: Clock::default(), queue: VecDeque::new() }
    }
}

/// An operation of a stream.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(super) stamp: Arc<Stamp>,
    pub(super) work: Work,
    /// The error with which it fails.
    pub(super) fails: Option<Code>,
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(super) has_time: bool,
    /// What it has recorded last.
    pub(super) mark: Option<Arc<Mark>>,
}
