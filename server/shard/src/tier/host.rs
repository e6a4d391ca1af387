//! Scratch space in host memory, for a server whose backend computes in the memory of a GPU.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, PoisonError, RwLock},
};

use zeroshard_kernels::Memory;

use super::scratch::Disk;

/// Host memory by position. The memory of each array is separate, so that it is returned to the
/// system when the array is dropped.
#[derive(Default)]
pub(super) struct HostMemory(RwLock<BTreeMap<u64, Arc<RwLock<Memory>>>>);

impl HostMemory {
    /// The memory that contains position `at`, and the offset of the position in it.
    fn find(&self, at: u64) -> io::Result<(Arc<RwLock<Memory>>, usize)> {
        let parts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (start, part) = parts.range(..=at).next_back().ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((part.clone(), (at - start) as usize))
    }
}

impl Disk for HostMemory {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        let (part, start) = self.find(at)?;
        let part = part.read().unwrap_or_else(PoisonError::into_inner);
        let found = part.bytes().get(start..).unwrap_or_default();
        let length = found.len().min(bytes.len());
        bytes[..length].copy_from_slice(&found[..length]);
        Ok(length)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let (part, start) = self.find(at)?;
        let mut part = part.write().unwrap_or_else(PoisonError::into_inner);
        let room = part.bytes_mut().get_mut(start..).unwrap_or_default();
        let length = room.len().min(bytes.len());
        room[..length].copy_from_slice(&bytes[..length]);
        Ok(length)
    }

    fn reserve(&self, at: u64, length: u64) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut memory = Memory::zeroed(length).ok_or(io::ErrorKind::OutOfMemory)?;
        memory.populate(0..length);
        let mut parts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        parts.insert(at, Arc::new(RwLock::new(memory)));
        Ok(())
    }

    fn release(&self, at: u64, _: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_separate_and_return_their_memory() {
        let memory = HostMemory::default();
        memory.reserve(0, 4_096).unwrap();
        memory.reserve(4_096, 8_192).unwrap();
        let mut bytes = [7; 6_000];
        assert_eq!(memory.write_at(&bytes, 4_096 + 4_096).unwrap(), 4_096);
        assert_eq!(memory.read_at(&mut bytes, 0).unwrap(), 4_096);
        assert!(bytes[..4_096].iter().all(|&byte| byte == 0));
        assert_eq!(memory.read_at(&mut bytes, 4_096 + 4_096).unwrap(), 4_096);
        assert!(bytes[..4_096].iter().all(|&byte| byte == 7));
        memory.release(4_096, 8_192);
        assert_eq!(memory.0.read().unwrap().len(), 1);
        assert_eq!(memory.read_at(&mut bytes, 4_096).unwrap(), 0);
    }

    #[test]
    fn missing_memory_is_an_error() {
        let error = HostMemory::default().reserve(0, u64::MAX / 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    }
}
