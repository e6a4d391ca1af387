//! Numbers of eight bytes, little endian, that two processes of a host send each other over a Unix
//! socket, which also shows that the other process still exists.

use std::{
    io,
    sync::{Mutex, MutexGuard},
};

use tokio::{net::UnixStream, sync::Notify};

/// The size of a number in bytes.
pub const NUMBER: usize = size_of::<u64>();
/// The most numbers that wait because the other process does not read.
const MAX_QUEUED: usize = 1 << 16;

/// One end of the socket.
#[derive(Debug)]
pub struct Numbers {
    socket: UnixStream,
    /// What the socket has not taken yet.
    queue: Mutex<Vec<u8>>,
    queued: Notify,
}

impl Numbers {
    /// The end of a socket to which nobody else writes.
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, queue: Mutex::default(), queued: Notify::new() }
    }

    /// The socket.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends a number, at the latest when [`Self::run`] can. Returns `false` if the other process
    /// does not read: the number is lost.
    pub fn send(&self, number: u64) -> bool {
        let bytes = number.to_le_bytes();
        let mut queue = self.lock();
        let sent = match queue.is_empty() {
            // An error shows again in `run`.
            true => self.socket.try_write(&bytes).unwrap_or(0),
            false => 0,
        };
        if sent == NUMBER {
            return true;
        }
        let has_room = queue.len() < MAX_QUEUED * NUMBER;
        if has_room {
            queue.extend_from_slice(&bytes[sent..]);
            self.queued.notify_one();
        }
        has_room
    }

    /// Calls `each` with every number that arrives, and sends the queued ones, until the other
    /// process closes its end.
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn run(&self, each: impl FnMut(u64)) -> io::Result<()> {
        tokio::select! {
            ended = self.receive(each) => ended,
            failed = self.write_queued() => failed,
        }
    }

    async fn receive(&self, mut each: impl FnMut(u64)) -> io::Result<()> {
        let mut bytes = [0; 512 * NUMBER];
        let mut held = 0;
        loop {
            let count = self.read(&mut bytes[held..]).await?;
            if count == 0 {
                return Ok(());
            }
            let end = held + count;
            let (numbers, rest) = bytes[..end].as_chunks();
            numbers.iter().for_each(|number| each(u64::from_le_bytes(*number)));
            held = rest.len();
            bytes.copy_within(end - held..end, 0);
        }
    }

    async fn write_queued(&self) -> io::Result<()> {
        loop {
            self.queued.notified().await;
            while !self.lock().is_empty() {
                self.socket.writable().await?;
                let mut queue = self.lock();
                match self.socket.try_write(&queue) {
                    Ok(count) => drop(queue.drain(..count)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// Waits until bytes arrive; 0 if the other process has closed its end.
    async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.readable().await?;
            match self.socket.try_read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    /// Sends two numbers, before [`Self::run`].
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn send_pair(&self, pair: [u64; 2]) -> io::Result<()> {
        let pair = pair.map(u64::to_le_bytes);
        let mut rest = pair.as_flattened();
        while !rest.is_empty() {
            // A socket that is new is not known to be writable.
            self.socket.writable().await?;
            match self.socket.try_write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives two numbers, before [`Self::run`].
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the other process closes its end; those of the socket.
    pub async fn pair(&self) -> io::Result<[u64; 2]> {
        let mut pair = [[0; NUMBER]; 2];
        let mut rest = pair.as_flattened_mut();
        while !rest.is_empty() {
            match self.read(rest).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => rest = &mut rest[count..],
            }
        }
        Ok(pair.map(u64::from_le_bytes))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.queue.lock().expect("no holder of the lock panics")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn all_numbers_arrive_in_order_also_if_the_socket_is_full_for_a_while() {
        const COUNT: u64 = 20_000;
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Arc::new(Numbers::new(one)), Numbers::new(other));
        let sending = one.clone();
        let task = tokio::spawn(async move { sending.run(|_| {}).await });
        // More than the socket takes, before the other end reads anything.
        assert!((0..COUNT).all(|number| one.send(number)));
        assert_eq!(other.pair().await.unwrap(), [0, 1]);
        other.send_pair([7, 8]).await.unwrap();
        let mut expected = 2..COUNT;
        let received = other.run(|number| assert_eq!(Some(number), expected.next()));
        let closed = async {
            while !one.lock().is_empty() {
                tokio::task::yield_now().await;
            }
            task.abort();
            let _ = task.await;
            drop(one);
        };
        tokio::join!(received, closed).0.unwrap();
        assert_eq!(expected.next(), None);
    }

    #[tokio::test]
    async fn an_end_that_does_not_read_costs_a_bounded_number() {
        let (one, _other) = UnixStream::pair().unwrap();
        let one = Numbers::new(one);
        let sent = (0..10 * MAX_QUEUED as u64).take_while(|&number| one.send(number)).count();
        assert!((MAX_QUEUED..2 * MAX_QUEUED).contains(&sent), "{sent}");
        assert!(one.lock().len() <= MAX_QUEUED * NUMBER + NUMBER);
    }
}
