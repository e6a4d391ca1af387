//! A GPU, through the driver of NVIDIA.
//!
//! Kernels run on one stream, the compute stream, in the order of their launches. Uploads and
//! downloads have streams of their own, so that they overlap with kernels. These are the fences
//! between the streams:
//!
//! | fence | before | after |
//! |---|---|---|
//! | [`Fence::Filled`] | the copy to a staging buffer's device memory | the kernels that read it |
//! | [`Fence::Consumed`] | the kernels that read it | the next copy to it |
//! | [`Fence::Sent`] | the copy from its pinned memory | the next values in it |
//! | [`Fence::Produced`] | the kernels that fill device memory | the copy from it |
//! | [`Fence::Arrived`] | the copy to pinned memory | the host that reads it |
//!
//! A buffer of a slice is allocated, used and freed on the compute stream, and needs no fence.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use cudarc::driver::{result, sys};

use super::{
    Device,
    launch::{Address, Launch, THREADS},
};
use crate::{Failure, Result, Usage, failure::DeviceName};
use handles::{Context, Event, Module, Stream, checked};
use staging::{Buffer, Ring};
use timers::Timers;

mod handles;
pub(crate) mod lane;
pub(crate) mod library;
mod staging;
mod timers;

/// The kernels.
const PTX: &str = include_str!("kernels.ptx");

/// The staging buffers of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Staging {
    /// The number of buffers in each direction.
    pub(crate) buffers: usize,
    /// The size of each of them.
    pub(crate) bytes: usize,
}

impl Default for Staging {
    fn default() -> Self {
        Self { buffers: 4, bytes: 4 << 20 }
    }
}

/// An order between operations of different streams, or of a stream and the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    Filled,
    Consumed,
    Sent,
    Produced,
    Arrived,
}

/// A GPU.
pub(crate) struct Gpu {
    // Dropped in this order; the context is last.
    uploads: Ring,
    downloads: Ring,
    timers: Timers,
    upload: Stream,
    compute: Stream,
    download: Stream,
    functions: HashMap<&'static str, sys::CUfunction>,
    _module: Module,
    context: Context,
    staging: Staging,
    is_lost: AtomicBool,
    uploaded: AtomicU64,
    downloaded: AtomicU64,
    /// A fence that is left out, to see that a test finds it.
    #[cfg(test)]
    pub(super) without: Option<Fence>,
}

// SAFETY: objects of the driver may be used by any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above, and the driver synchronises its calls.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens a device.
    pub(crate) fn open(device: usize, staging: Staging) -> Result<Self> {
        library::device_count()?;
        let context = Context::new(device)?;
        context.bind()?;
        let ptx = CString::new(PTX).expect("PTX is text");
        let module = Module::new(device, &ptx)?;
        let mut functions = HashMap::new();
        for kernel in PTX.split(".entry ").skip(1).filter_map(|text| text.split_once('(')) {
            let name = CString::new(kernel.0).expect("PTX is text");
            // SAFETY: the module is loaded.
            let found = unsafe { result::module::get_function(module.0, name) };
            functions.insert(kernel.0, checked(device, "find a kernel", 0, found)?);
        }
        Ok(Self {
            upload: Stream::new(device)?,
            compute: Stream::new(device)?,
            download: Stream::new(device)?,
            uploads: Ring::new(device, staging.buffers, staging.bytes)?,
            downloads: Ring::new(device, staging.buffers, staging.bytes)?,
            timers: Timers::new(device)?,
            functions,
            _module: module,
            context,
            staging,
            is_lost: AtomicBool::new(false),
            uploaded: AtomicU64::new(0),
            downloaded: AtomicU64::new(0),
            #[cfg(test)]
            without: None,
        })
    }

    fn checked<T>(
        &self,
        operation: &'static str,
        bytes: usize,
        done: std::result::Result<T, result::DriverError>,
    ) -> Result<T> {
        checked(self.context.device, operation, bytes, done)
            .inspect_err(|failure| self.note(failure))
    }

    /// Makes the context current in this thread.
    fn bind(&self) -> Result<()> {
        self.context.bind().inspect_err(|failure| self.note(failure))
    }

    fn note(&self, failure: &Failure) {
        if matches!(failure, Failure::Lost { .. }) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }

    fn launch_one(&self, launch: &Launch) -> Result<()> {
        let function = self.functions[launch.kernel];
        let mut arguments: Vec<_> = launch.arguments().iter().map(|of| of.cast_mut()).collect();
        let (blocks, threads) = ((launch.blocks as u32, 1, 1), (THREADS as u32, 1, 1));
        let stream = self.compute.0;
        // SAFETY: the arguments are those of the kernel, which runs on memory that is allocated.
        let launched =
            unsafe { result::launch_kernel(function, blocks, threads, 0, stream, &mut arguments) };
        checked(self.context.device, "launch a kernel", 0, launched)
    }

    /// Returns whether a fence is kept; always, outside tests.
    fn keeps(&self, fence: Fence) -> bool {
        #[cfg(test)]
        return self.without != Some(fence);
        #[cfg(not(test))]
        {
            let _ = fence;
            true
        }
    }

    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        // SAFETY: both exist.
        self.checked("record an event", 0, unsafe { result::event::record(event.0, stream.0) })
    }

    /// Has later operations of a stream wait for an event.
    fn wait(&self, stream: &Stream, event: &Event, fence: Fence) -> Result<()> {
        if !self.keeps(fence) {
            return Ok(());
        }
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist.
        let done = unsafe { result::stream::wait_event(stream.0, event.0, flags) };
        self.checked("wait for an event", 0, done)
    }

    /// Waits for an event, in this thread.
    fn synchronize(&self, event: &Event, fence: Fence) -> Result<()> {
        if !self.keeps(fence) {
            return Ok(());
        }
        // SAFETY: the event exists.
        let done = unsafe { result::event::synchronize(event.0) };
        self.checked("synchronize with the device", 0, done)
    }

    /// Waits until the device has nothing to do, or is lost.
    fn drain(&self) {
        for stream in [&self.upload, &self.compute, &self.download] {
            // SAFETY: the stream exists. An error is that of an earlier operation.
            let _ = unsafe { result::stream::synchronize(stream.0) };
        }
    }

    /// Uses a staging buffer. After an error nothing uses the buffer any more.
    fn with_buffer(&self, ring: &Ring, uses: impl FnOnce(&mut Buffer) -> Result<()>) -> Result<()> {
        self.bind()?;
        let mut buffer = ring.take();
        let done = uses(&mut buffer);
        if done.is_err() {
            self.drain();
        }
        ring.put(buffer);
        done
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            self.drain();
        }
    }
}

impl Device for Gpu {
    fn number(&self) -> usize {
        self.context.device
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    fn stage_bytes(&self) -> usize {
        self.staging.bytes
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        if bytes > self.context.capacity {
            // Drivers differ in what they make of it.
            return Err(Failure::out_of_memory(DeviceName::Cuda(self.context.device), bytes));
        }
        self.bind()?;
        // SAFETY: the memory is freed once.
        let allocated = unsafe { result::malloc_async(self.compute.0, bytes.max(1)) };
        let address = self.checked("allocate memory", bytes, allocated)?;
        // SAFETY: the memory has this size.
        let zeroed = unsafe { result::memset_d8_async(address, 0, bytes.max(1), self.compute.0) };
        self.checked("clear memory", bytes, zeroed).inspect_err(|_| self.free(address))?;
        Ok(address)
    }

    fn free(&self, address: Address) {
        // A lost device reports its error here, and frees nevertheless.
        let _ = self.bind();
        // SAFETY: the memory was allocated, and the operations that use it are on the same stream.
        let freed = unsafe { result::free_async(address, self.compute.0) };
        if let Err(error) = self.checked("free memory", 0, freed) {
            tracing::debug!(%error, "memory could not be freed");
        }
    }

    fn launch(&self, launches: &[Launch]) -> Result<()> {
        if launches.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let measured = self.timers.measure(&self.compute, || {
            launches.iter().try_for_each(|launch| self.launch_one(launch))
        });
        measured.inspect_err(|failure| self.note(failure))
    }

    fn usage(&self) -> Usage {
        let bound = self.bind();
        let memory = bound.ok().and_then(|()| result::mem_get_info().ok());
        Usage {
            memory: memory.map(|(free, total)| (total.saturating_sub(free) as u64, total as u64)),
            uploaded: self.uploaded.load(Ordering::Relaxed),
            downloaded: self.downloaded.load(Ordering::Relaxed),
            kernels: self.timers.time(),
        }
    }

    fn upload(
        &self,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()> {
        assert!(bytes <= self.staging.bytes, "an upload fits into a staging buffer");
        self.with_buffer(&self.uploads, |buffer| {
            self.synchronize(&buffer.copied, Fence::Sent)?;
            // SAFETY: the pinned memory has at least this size, and no copy uses it any more.
            let pinned =
                unsafe { std::slice::from_raw_parts_mut(buffer.pinned.0.cast::<u8>(), bytes) };
            fill(pinned);
            self.wait(&self.upload, &buffer.used, Fence::Consumed)?;
            // SAFETY: the device memory has at least this size, and the pinned memory is not
            // changed before the event.
            let copied =
                unsafe { result::memcpy_htod_async(buffer.memory.0, pinned, self.upload.0) };
            self.checked("upload values", bytes, copied)?;
            self.uploaded.fetch_add(bytes as u64, Ordering::Relaxed);
            self.record(&buffer.copied, &self.upload)?;
            self.wait(&self.compute, &buffer.copied, Fence::Filled)?;
            launches(buffer.memory.0)?;
            self.record(&buffer.used, &self.compute)
        })
    }

    fn download(
        &self,
        bytes: &mut [u8],
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()> {
        assert!(bytes.len() <= self.staging.bytes, "a download fits into a staging buffer");
        self.with_buffer(&self.downloads, |buffer| {
            let (memory, size) = (buffer.memory.0, bytes.len());
            launches(memory)?;
            self.record(&buffer.used, &self.compute)?;
            self.wait(&self.download, &buffer.used, Fence::Produced)?;
            // SAFETY: the pinned memory has at least this size, and is not read before the event.
            let pinned =
                unsafe { std::slice::from_raw_parts_mut(buffer.pinned.0.cast::<u8>(), size) };
            // SAFETY: the device memory has at least this size.
            let copied = unsafe { result::memcpy_dtoh_async(pinned, memory, self.download.0) };
            self.checked("download values", size, copied)?;
            self.downloaded.fetch_add(size as u64, Ordering::Relaxed);
            self.record(&buffer.copied, &self.download)?;
            self.synchronize(&buffer.copied, Fence::Arrived)?;
            bytes.copy_from_slice(pinned);
            Ok(())
        })
    }
}
