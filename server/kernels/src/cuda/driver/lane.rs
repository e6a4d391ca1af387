//! A stream of a GPU, with memory for messages that a library transfers between GPUs.

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::{
    super::launch::Address,
    handles::{Context, Event, Pinned, Static, Stream, checked},
    library,
};
use crate::Result;

/// The alignment of a message.
const ALIGNMENT: usize = 256;

/// A stream of a GPU, and memory for messages: pinned memory of the host, and memory of the device
/// of the same size, for those that are sent and for those that are received.
///
/// Its operations are queued in the order of the calls. After [`Self::arrive`], no other method may
/// be called until [`Self::is_done`] returns true: then the messages have been received.
pub struct Lane {
    // Dropped in this order; the context is last.
    sent: Memory,
    received: Memory,
    done: Event,
    stream: Stream,
    context: Context,
}

// SAFETY: objects of the driver may be used by any thread; a lane is used by one at a time.
unsafe impl Send for Lane {}

/// Memory for messages.
#[derive(Default)]
struct Memory {
    buffers: Option<(Pinned, Static)>,
    bytes: usize,
    /// Where each message begins, and its bytes.
    messages: Vec<(usize, usize)>,
}

impl Memory {
    /// Provides memory for messages of these sizes. Returns their addresses in the device's memory.
    fn hold(&mut self, device: usize, sizes: &[usize]) -> Result<Vec<Address>> {
        let mut end = 0;
        self.messages.clear();
        for &size in sizes {
            self.messages.push((end, size));
            end += size.next_multiple_of(ALIGNMENT);
        }
        if end > self.bytes || self.buffers.is_none() {
            // The old memory is freed first.
            *self = Self { messages: std::mem::take(&mut self.messages), ..Self::default() };
            let bytes = end.max(ALIGNMENT).next_power_of_two();
            self.buffers = Some((Pinned::new(device, bytes)?, Static::new(device, bytes)?));
            self.bytes = bytes;
        }
        let base = self.buffers.as_ref().map_or(0, |(_, memory)| memory.0);
        Ok(self.messages.iter().map(|(start, _)| base + *start as Address).collect())
    }

    /// The pinned memory of each message, and its address in the device's memory.
    fn each(&mut self) -> impl Iterator<Item = (&mut [u8], Address)> {
        let (pinned, base) =
            self.buffers.as_ref().map_or((std::ptr::null_mut(), 0), |of| (of.0.0, of.1.0));
        self.messages.iter().map(move |&(start, size)| {
            // SAFETY: the messages are separate ranges of the memory, which lives as long as
            // `self`, and nothing is queued that accesses them.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(pinned.cast::<u8>().add(start), size) };
            (bytes, base + start as Address)
        })
    }
}

impl Lane {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`Failure`](crate::Failure) if there is no driver or no such device, or a call of
    /// the driver fails; the same for all methods.
    pub fn open(device: usize) -> Result<Self> {
        library::device_count()?;
        let context = Context::new(device)?;
        context.bind()?;
        Ok(Self {
            sent: Memory::default(),
            received: Memory::default(),
            done: Event::new(device)?,
            stream: Stream::new(device)?,
            context,
        })
    }

    /// Makes the GPU current in this thread. The other methods and the library require it.
    pub fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    /// The stream (`CUstream`).
    pub fn stream(&self) -> *mut c_void {
        self.stream.0.cast()
    }

    /// Queues the copies of messages to the device. Returns their addresses there.
    pub fn send(&mut self, messages: &[&[u8]]) -> Result<Vec<u64>> {
        let device = self.context.device;
        let sizes: Vec<usize> = messages.iter().map(|message| message.len()).collect();
        let addresses = self.sent.hold(device, &sizes)?;
        for (message, (pinned, address)) in messages.iter().zip(self.sent.each()) {
            pinned.copy_from_slice(message);
            if !message.is_empty() {
                // SAFETY: both have this size, and the pinned memory is not changed until the lane
                // is done.
                let copied = unsafe { result::memcpy_htod_async(address, pinned, self.stream.0) };
                checked(device, "upload a message", message.len(), copied)?;
            }
        }
        Ok(addresses)
    }

    /// Provides memory for messages of these sizes. Returns its addresses on the device.
    pub fn receive(&mut self, sizes: &[usize]) -> Result<Vec<u64>> {
        self.received.hold(self.context.device, sizes)
    }

    /// Queues the copies of the received messages to the host.
    pub fn arrive(&mut self) -> Result<()> {
        let device = self.context.device;
        for (pinned, address) in self.received.each().filter(|(pinned, _)| !pinned.is_empty()) {
            let size = pinned.len();
            // SAFETY: both have this size, and the pinned memory is not read until the lane is
            // done.
            let copied = unsafe { result::memcpy_dtoh_async(pinned, address, self.stream.0) };
            checked(device, "download a message", size, copied)?;
        }
        // SAFETY: both exist.
        let recorded = unsafe { result::event::record(self.done.0, self.stream.0) };
        checked(device, "record an event", 0, recorded)
    }

    /// Returns whether everything that was queued is complete.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.done.0) } {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            queried => checked(self.context.device, "wait for messages", 0, queried).map(|()| true),
        }
    }

    /// The received messages, as f32.
    pub fn take(&mut self) -> Vec<Vec<f32>> {
        let values = |bytes: &[u8]| {
            let mut values = vec![0.0; bytes.len() / size_of::<f32>()];
            bytemuck::must_cast_slice_mut::<f32, u8>(&mut values).copy_from_slice(bytes);
            values
        };
        self.received.each().map(|(bytes, _)| values(bytes)).collect()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: the stream exists. An error is that of an earlier operation.
            let _ = unsafe { result::stream::synchronize(self.stream.0) };
        }
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lane(cuda:{})", self.context.device)
    }
}
