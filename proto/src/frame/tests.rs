//! Written messages can be read by this parser and by generated code, with any buffer boundaries.
//! Malformed messages are refused.
//!
//! promise: invalid-input

use bytes::{BufMut, Bytes, BytesMut};
use proptest::prelude::*;
use prost::Message;
use zeroshard_model::{DType, Error, Result};

use super::{prefix::PREFIX, *};
use crate::pb;

const MAX: usize = 1 << 20;

/// Passes `wire` to a decoder in pieces of the given lengths (cyclic), and joins the pieces of each
/// payload.
fn read(wire: &[u8], pieces: &[usize]) -> Result<Vec<Event>> {
    let mut decoder = Decoder::new(MAX);
    let mut events = Vec::new();
    let mut lengths = pieces.iter().cycle();
    let mut rest = wire;
    while !rest.is_empty() {
        let length = (*lengths.next().expect("cycle")).clamp(1, rest.len());
        decoder.feed(Bytes::copy_from_slice(&rest[..length]));
        rest = &rest[length..];
        while let Some(event) = decoder.next()? {
            match (events.last_mut(), event) {
                (Some(Event::Payload(before)), Event::Payload(more)) => {
                    *before = [&before[..], &more[..]].concat().into();
                }
                (_, event) => events.push(event),
            }
        }
    }
    decoder.finish()?;
    Ok(events)
}

fn write(extents: &[(Extent, Bytes)]) -> Vec<u8> {
    let mut writer = Writer::default();
    let mut wire = Vec::new();
    for (extent, payload) in extents {
        writer.extent(*extent, payload.clone());
    }
    writer.flush();
    while let Some(frame) = writer.next_frame() {
        wire.extend_from_slice(&frame);
    }
    wire
}

fn prefixed(message: &[u8]) -> Vec<u8> {
    let mut wire = BytesMut::new();
    wire.put_u8(0);
    wire.put_u32(message.len() as u32);
    wire.extend_from_slice(message);
    wire.to_vec()
}

fn extent() -> impl Strategy<Value = (Extent, Bytes)> {
    let wire = prop::sample::select(Wire::ALL.to_vec());
    (any::<u32>(), any::<u64>(), wire, 1usize..20_000).prop_map(
        |(slice, offset, wire, elements)| {
            let payload = (0..wire.bytes(elements)).map(|i| (i * 7) as u8).collect();
            (Extent { slice, offset, wire }, payload)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn written_messages_are_read_for_all_buffer_boundaries(
        extents in prop::collection::vec(extent(), 0..5),
        pieces in prop::collection::vec(1usize..9000, 1..5),
    ) {
        let events = read(&write(&extents), &pieces).unwrap();
        let expected = extents.iter().flat_map(|(extent, payload)| {
            let elements = extent.wire.elements(payload.len() as u64).unwrap();
            [Event::Extent(*extent, elements), Event::Payload(payload.clone())]
        });
        prop_assert_eq!(events, expected.collect::<Vec<_>>());
    }

    #[test]
    fn generated_code_reads_written_messages((extent, payload) in extent()) {
        let wire = write(&[(extent, payload.clone())]);
        let message = pb::PullResponse::decode(&wire[PREFIX..]).unwrap();
        prop_assert_eq!(message.slice, extent.slice);
        prop_assert_eq!(message.offset, extent.offset);
        prop_assert_eq!(message.payload, payload);
    }

    #[test]
    fn messages_of_generated_code_are_read(
        slice: u32, offset: u64, step: u64, one in 1usize..9,
    ) {
        let gradients = pb::Gradients { step, attempt: 0, absent: vec![7, 300], ..Default::default() };
        let contents = Some(pb::push_begin::Contents::Gradients(gradients));
        let begin = pb::PushBegin { job: "job".into(), epoch: 3, rank: 1, contents, ..Default::default() };
        let message = pb::PushRequest {
            hold: 0,
            at: 0,
            bytes: 0,
            begin: Some(begin.clone()),
            slice,
            offset,
            dtype: pb::Dtype::F32.into(),
            payload: Bytes::from_static(&[1, 2, 3, 4]),
        };
        let events = read(&prefixed(&message.encode_to_vec()), &[one]).unwrap();
        let extent = Extent { slice, offset, wire: Wire::Plain(DType::F32) };
        prop_assert_eq!(events, vec![
            Event::Begin(begin),
            Event::Extent(extent, 1),
            Event::Payload(message.payload),
        ]);
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        wire in prop::collection::vec(any::<u8>(), 0..200),
        pieces in prop::collection::vec(1usize..50, 1..5),
    ) {
        let _ = read(&wire, &pieces);
    }

    #[test]
    fn any_fields_are_read_or_refused_alike_for_all_buffer_boundaries(
        message in prop::collection::vec(any::<u8>(), 0..60),
        piece in 1usize..50,
    ) {
        let wire = prefixed(&message);
        prop_assert_eq!(read(&wire, &[piece]), read(&wire, &[wire.len()]));
    }
}

#[test]
fn references_are_read_by_this_parser_and_by_generated_code() {
    let extent = Extent { slice: 3, offset: 1 << 40, wire: Wire::Plain(DType::Bf16) };
    let reference = Reference { at: u64::MAX, bytes: 1 << 33, hold: 300, lasts: true };
    let mut writer = Writer::default();
    writer.reference(extent, reference);
    writer.flush();
    let wire = writer.next_frame().unwrap();
    for pieces in [1, 2, wire.len()] {
        let expected = [Event::Extent(extent, 1 << 32), Event::Reference(reference)];
        assert_eq!(read(&wire, &[pieces]).unwrap(), expected);
    }
    let message = pb::PullResponse::decode(&wire[PREFIX..]).unwrap();
    assert_eq!((message.at, message.bytes, message.hold), (u64::MAX, 1 << 33, 300));
    assert!(message.lasts);
    assert!(message.payload.is_empty());
}

#[test]
fn an_extent_has_a_payload_or_a_reference_of_whole_elements() {
    let dtype = pb::Dtype::F32.into();
    for (bytes, payload, expected) in [
        (4, &[0; 4][..], "a payload and elements in the window"),
        (6, &[], "one or more elements of 4 bytes"),
    ] {
        let payload = payload.to_vec().into();
        let message = pb::PushRequest { dtype, bytes, payload, ..Default::default() };
        let refused = read(&prefixed(&message.encode_to_vec()), &[7]).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

/// The events of a payload, before they are joined.
fn payloads(wire: &[u8], piece: usize) -> Vec<usize> {
    let mut decoder = Decoder::new(MAX);
    let mut lengths = Vec::new();
    for piece in wire.chunks(piece) {
        decoder.feed(Bytes::copy_from_slice(piece));
        while let Some(event) = decoder.next().unwrap() {
            if let Event::Payload(bytes) = event {
                lengths.push(bytes.len());
            }
        }
    }
    lengths
}

#[test]
fn tiles_are_never_cut() {
    let extent = Extent { slice: 0, offset: 0, wire: Wire::Int8 };
    let payload: Bytes = vec![1; Wire::Int8.bytes(3 * 128 + 5)].into();
    let wire = write(&[(extent, payload.clone())]);
    for piece in 1..wire.len() + 1 {
        let lengths = payloads(&wire, piece);
        let (last, whole) = lengths.split_last().unwrap();
        assert!(whole.iter().all(|length| length % 132 == 0), "{piece}: {lengths:?}");
        assert_eq!(last % 132, 9, "{piece}: {lengths:?}");
        assert_eq!(lengths.iter().sum::<usize>(), payload.len());
    }
}

#[test]
fn unknown_fields_are_skipped() {
    let known = pb::PullResponse {
        slice: 1,
        dtype: pb::Dtype::Bf16.into(),
        payload: Bytes::from_static(&[1, 2]),
        ..Default::default()
    };
    // Field 9: a varint; field 10: bytes; field 11: fixed64; field 12: fixed32.
    let mut message = vec![9 << 3, 5, 10 << 3 | 2, 2, 8, 8, 11 << 3 | 1];
    message.extend([0; 8]);
    message.push(12 << 3 | 5);
    message.extend([0; 4]);
    message.extend(known.encode_to_vec());
    assert_eq!(read(&prefixed(&message), &[3]).unwrap().len(), 2);
}

fn refused(wire: &[u8], why: &str) {
    let error = read(wire, &[7]).expect_err(why);
    assert!(matches!(error, Error::Invalid { .. } | Error::Refused { .. }), "{wire:?}: {error:?}");
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn malformed_messages_are_refused() {
    refused(&[1, 0, 0, 0, 0], "is compressed"); // compressed
    refused(&[0, 0xff, 0xff, 0xff, 0xff], "at most 1048576 bytes"); // longer than the limit
    refused(&prefixed(&[15 << 3 | 2, 9, 0]), "with 1 bytes left has a field of 9"); // a payload longer than its message
    refused(&prefixed(&[15 << 3 | 2, 1, 0, 2 << 3, 1]), "a field follows `payload`"); // a field after the payload
    refused(&prefixed(&[4 << 3, 1, 15 << 3 | 2, 3, 0, 0, 0]), "one or more elements of 4 bytes"); // three bytes of f32
    refused(&prefixed(&[4 << 3, 9, 15 << 3 | 2, 4, 0, 0, 0, 0]), "f32, bf16, f16 or int8"); // an unknown dtype
    refused(&prefixed(&[4 << 3, 1, 15 << 3 | 2, 0]), "one or more elements of 4 bytes"); // an empty payload
    refused(&prefixed(&[4 << 3, 4, 15 << 3 | 2, 4, 0, 0, 0, 0]), "one or more tiles"); // a scale alone
    refused(&prefixed(&[3]), "unsupported wire type 3"); // wire type 3
    refused(&prefixed(&[0xff; 11]), "a varint longer than 10 bytes"); // a varint without an end
    refused(
        &prefixed(&[4 << 3, 1, 15 << 3 | 2, 4, 0, 0, 0, 0])[..10],
        "ended in the middle of a message",
    ); // truncated
    let long = vec![0u8; 5000];
    let mut fields = vec![9 << 3 | 2, 0x88, 0x27];
    fields.extend(long);
    refused(&prefixed(&fields), "the fields before `payload` exceed 4096 bytes"); // more fields before the payload than the limit
}
