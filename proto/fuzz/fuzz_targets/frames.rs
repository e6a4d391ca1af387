//! Parses arbitrary bytes as the body of a push or of a pull's response. The parser must not panic,
//! every payload must belong to an announced extent, and the boundaries of the input buffers must
//! not change the result.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use zeroshard_proto::frame::{Decoder, Event, Extent, Reference};

const MAX_MESSAGE: usize = 1 << 16;

/// A message of the stream, with its payload in one piece.
#[derive(Debug, PartialEq)]
enum Whole {
    Begin(String),
    Extent(Extent, u64, Vec<u8>),
    Reference(Reference),
}

/// Reads `input` in pieces of `piece` bytes. Returns the messages, and whether reading ended in an
/// error.
fn read(input: &[u8], piece: usize) -> (Vec<Whole>, bool) {
    let mut decoder = Decoder::new(MAX_MESSAGE);
    let mut whole = Vec::new();
    for piece in input.chunks(piece) {
        decoder.feed(Bytes::copy_from_slice(piece));
        loop {
            match decoder.next() {
                Ok(None) => break,
                Err(_) => return (whole, true),
                Ok(Some(Event::Begin(begin))) => whole.push(Whole::Begin(format!("{begin:?}"))),
                Ok(Some(Event::Extent(extent, elements))) => {
                    whole.push(Whole::Extent(extent, elements, Vec::new()));
                }
                Ok(Some(Event::Payload(bytes))) => {
                    let Some(Whole::Extent(extent, elements, payload)) = whole.last_mut() else {
                        panic!("a payload without an extent");
                    };
                    assert!(*elements <= MAX_MESSAGE as u64);
                    assert!(extent.wire.elements(bytes.len() as u64).is_some());
                    payload.extend_from_slice(&bytes);
                    assert!(payload.len() <= extent.wire.bytes(*elements as usize));
                }
                Ok(Some(Event::Reference(reference))) => {
                    let Some(Whole::Extent(extent, elements, _)) = whole.last() else {
                        panic!("a reference without an extent");
                    };
                    assert_eq!(extent.wire.elements(reference.bytes), Some(*elements));
                    whole.push(Whole::Reference(reference));
                }
            }
        }
    }
    (whole, decoder.finish().is_err())
}

fuzz_target!(|data: &[u8]| {
    let Some((&piece, input)) = data.split_first() else { return };
    let at_once = read(input, input.len().max(1));
    let in_pieces = read(input, usize::from(piece) + 1);
    match (at_once.1, in_pieces.1) {
        (false, false) => assert_eq!(at_once, in_pieces),
        // An error may be found before the preceding payloads are returned.
        (true, true) => {}
        _ => panic!("{at_once:?} and {in_pieces:?}"),
    }
});
