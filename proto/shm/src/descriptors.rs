//! Descriptors that go from one process to another over a Unix socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// The most descriptors of one message.
const MAX: usize = 2;

/// Sends `bytes`, of which there is at least one, with up to two descriptors.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] on a socket that does not wait; [`io::ErrorKind::WriteZero`] if
/// not all bytes were sent; those of the system.
pub fn send(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    match sent == bytes.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives up to `bytes.len()` bytes, and the descriptors that came with them, which programs that
/// this one starts do not inherit. 0 bytes: the other process has closed the socket.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] on a socket that does not wait; those of the system.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().collect()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{PAGE, Segment, View};

    #[test]
    fn a_segment_arrives_with_the_bytes_of_its_message() {
        let (one, other) = UnixStream::pair().unwrap();
        let segment = Segment::create("test", PAGE).unwrap();
        send(&one, b"here", &[segment.file(), segment.file()]).unwrap();
        let mut bytes = [0; 16];
        let (count, mut files) = receive(&other, &mut bytes).unwrap();
        assert_eq!((&bytes[..count], files.len()), (&b"here"[..], 2));
        assert!(View::new(files.remove(0), PAGE).is_ok());
        // The space for descriptors is rounded up.
        assert!(send(&one, b"x", &[segment.file(); 8]).is_err());
        drop(one);
        assert_eq!(receive(&other, &mut bytes).unwrap().0, 0);
    }
}
