//! The baseline "raw TCP": one TCP stream with blocking calls, directly from and into an array. It
//! is the limit of the machine.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
};

type Error = Box<dyn std::error::Error>;

const PULL: u8 = 0;
const PUSH: u8 = 1;
/// The largest single read or write.
const CHUNK: usize = 1 << 20;

/// Serves one client.
pub(crate) fn serve() -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    crate::table::print_listening(&listener.local_addr()?.to_string());
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut array = Vec::new();
    let mut request = [0u8; 9];
    while stream.read_exact(&mut request).is_ok() {
        let [operation, bytes @ ..] = request;
        array.resize(u64::from_le_bytes(bytes) as usize, 1);
        if operation == PULL {
            write(&mut stream, &array)?;
        } else {
            read(&mut stream, &mut array)?;
            stream.write_all(&[1])?;
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, array: &[u8]) -> std::io::Result<()> {
    array.chunks(CHUNK).try_for_each(|chunk| stream.write_all(chunk))
}

fn read(stream: &mut TcpStream, array: &mut [u8]) -> std::io::Result<()> {
    array.chunks_mut(CHUNK).try_for_each(|chunk| stream.read_exact(chunk))
}

pub(super) struct Client {
    stream: TcpStream,
    array: Vec<u8>,
}

impl Client {
    pub(super) fn connect(address: &str, bytes: usize) -> Result<Self, Error> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, array: vec![1; bytes] })
    }

    fn request(&mut self, operation: u8) -> std::io::Result<()> {
        let mut request = [operation; 9];
        request[1..].copy_from_slice(&(self.array.len() as u64).to_le_bytes());
        self.stream.write_all(&request)
    }

    pub(super) fn pull(&mut self) -> Result<(), Error> {
        self.request(PULL)?;
        Ok(read(&mut self.stream, &mut self.array)?)
    }

    pub(super) fn push(&mut self) -> Result<(), Error> {
        self.request(PUSH)?;
        write(&mut self.stream, &self.array)?;
        Ok(self.stream.read_exact(&mut [0])?)
    }
}
