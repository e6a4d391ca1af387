//! Limits that are checked before a request to create a job is decoded: decoding millions of small
//! fields takes much longer than receiving them.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use zeroshard_model::{
    Error, Result,
    job::check_number,
    limits::{MAX_GROUPS, MAX_HYPERPARAMETERS, MAX_MESH_DIMS, MAX_MESHES, MAX_SPEC_BYTES},
    manifest::check_number_of_tensors,
};

/// The fields of the messages in `zeroshard/v1`.
const REQUEST_SPEC: u32 = 1;
const SPEC_TENSORS: u32 = 2;
const SPEC_GROUPS: u32 = 3;
const SPEC_MESHES: u32 = 7;
const MESH_DIMS: u32 = 1;
const GROUP_HYPERPARAMETERS: u32 = 2;
const TENSOR_LAYOUT: u32 = 10;
const LAYOUT_PLACEMENTS: u32 = 2;

/// Checks an encoded `CreateJobRequest`. Data that is not such a message is not an error here,
/// because the decoder reports it. The size includes fields that the decoder does not know.
///
/// # Errors
/// [`Error::Invalid`] for a specification that is too large, or has too much of something that is a
/// field of its own.
pub(crate) fn check_encoded(request: &[u8]) -> Result<()> {
    // A decoder merges repeated occurrences of a message.
    let (mut bytes, mut tensors, mut meshes, mut groups) = (0, 0, 0, 0);
    for spec in contents(request, REQUEST_SPEC) {
        bytes += spec.len();
        check_size(bytes)?;
        for (field, part) in fields(spec) {
            match field {
                SPEC_TENSORS => {
                    tensors += 1;
                    let layouts = contents(part, TENSOR_LAYOUT);
                    let placements = layouts.map(|layout| count(layout, LAYOUT_PLACEMENTS)).sum();
                    check_number("placements", placements, MAX_MESH_DIMS)?;
                }
                SPEC_MESHES => {
                    meshes += 1;
                    check_number("dimensions of a mesh", count(part, MESH_DIMS), MAX_MESH_DIMS)?;
                }
                SPEC_GROUPS => {
                    groups += 1;
                    let number = count(part, GROUP_HYPERPARAMETERS);
                    let what = "hyperparameters of a parameter group";
                    check_number(what, number, MAX_HYPERPARAMETERS)?;
                }
                _ => {}
            }
        }
    }
    check_number_of_tensors(tensors)?;
    check_number("meshes", meshes, MAX_MESHES)?;
    check_number("parameter groups", groups, MAX_GROUPS)
}

/// Checks the size of an encoded specification, in bytes.
///
/// # Errors
/// [`Error::Invalid`] for more than [`MAX_SPEC_BYTES`].
pub(super) fn check_size(bytes: usize) -> Result<()> {
    if bytes > MAX_SPEC_BYTES {
        let expected = format!("at most {MAX_SPEC_BYTES} bytes");
        return Err(Error::invalid("size of the specification of the job", bytes, expected));
    }
    Ok(())
}

fn count(message: &[u8], number: u32) -> usize {
    contents(message, number).count()
}

/// The contents of the fields with this number.
fn contents(message: &[u8], number: u32) -> impl Iterator<Item = &[u8]> {
    fields(message).filter(move |(field, _)| *field == number).map(|(_, content)| content)
}

/// The numbers and contents of the fields that are strings, messages or packed numbers. Ends where
/// the data is not a message.
fn fields(mut message: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        while !message.is_empty() {
            let (field, wire_type) = decode_key(&mut message).ok()?;
            if wire_type == WireType::LengthDelimited {
                let length = usize::try_from(decode_varint(&mut message).ok()?).ok()?;
                let (content, rest) = message.split_at_checked(length)?;
                message = rest;
                return Some((field, content));
            }
            skip_field(wire_type, field, &mut message, DecodeContext::default()).ok()?;
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use zeroshard_model::limits::MAX_TENSORS;

    use super::*;
    use crate::pb;

    fn checked(spec: pb::JobSpec) -> String {
        let request = pb::CreateJobRequest { spec: Some(spec), ..Default::default() };
        match check_encoded(&request.encode_to_vec()) {
            Ok(()) => "accepted".to_owned(),
            Err(Error::Invalid { what, found, .. }) => format!("{what}: {found}"),
            Err(other) => panic!("{other:?}"),
        }
    }

    // promise: invalid-input
    #[test]
    fn an_encoded_specification_with_too_much_of_anything_is_refused_and_one_at_the_limit_is_not() {
        let spec = |tensors, dims, hyperparameters| pb::JobSpec {
            name: "job".to_owned(),
            world: 3,
            tensors: vec![pb::Tensor::default(); tensors],
            meshes: vec![
                pb::Mesh { dims: vec![pb::MeshDim::default(); 1], ranks: vec![0] },
                pb::Mesh { dims: vec![pb::MeshDim::default(); dims], ranks: vec![0] },
            ],
            groups: vec![pb::Optimizer {
                name: "sgd".to_owned(),
                hyperparameters: (0..hyperparameters).map(|n| (format!("h{n}"), 1.0)).collect(),
            }],
            idle_timeout_ms: Some(1),
            ..Default::default()
        };
        let at_limit = (MAX_TENSORS, MAX_MESH_DIMS, MAX_HYPERPARAMETERS);
        assert_eq!(checked(spec(at_limit.0, at_limit.1, at_limit.2)), "accepted");
        assert_eq!(checked(spec(MAX_TENSORS + 1, 1, 0)), "number of tensors: 1048577");
        assert_eq!(checked(spec(1, 33, 0)), "number of dimensions of a mesh: 33");
        let mut many = spec(1, 1, 0);
        let placements = vec![pb::DimPlacement::default(); 33];
        many.tensors[0].layout = Some(pb::Layout { mesh: 0, placements });
        assert_eq!(checked(many), "number of placements: 33");
        let many = pb::JobSpec { meshes: vec![pb::Mesh::default(); 1025], ..spec(1, 1, 0) };
        assert_eq!(checked(many), "number of meshes: 1025");
        let many = pb::JobSpec { groups: vec![pb::Optimizer::default(); 1025], ..spec(1, 1, 0) };
        assert_eq!(checked(many), "number of parameter groups: 1025");
        let number = MAX_HYPERPARAMETERS + 1;
        let found = format!("number of hyperparameters of a parameter group: {number}");
        assert_eq!(checked(spec(1, 1, number)), found);
        let named = |bytes| pb::JobSpec { name: "x".repeat(bytes), ..Default::default() };
        let found = checked(named(MAX_SPEC_BYTES));
        assert!(found.starts_with("size of the specification of the job: 3355443"), "{found}");
        assert_eq!(checked(named(MAX_SPEC_BYTES - 100)), "accepted");
    }

    #[test]
    fn occurrences_of_a_specification_are_checked_together() {
        let spec = pb::JobSpec {
            tensors: vec![pb::Tensor::default(); MAX_TENSORS / 2 + 1],
            ..Default::default()
        };
        let request = pb::CreateJobRequest { spec: Some(spec), ..Default::default() };
        let mut encoded = request.encode_to_vec();
        assert_eq!(check_encoded(&encoded), Ok(()));
        encoded.extend_from_within(..);
        assert!(matches!(check_encoded(&encoded), Err(Error::Invalid { .. })));
    }

    #[test]
    fn data_that_is_not_a_message_is_left_to_the_decoder() {
        for data in [&[0xff; 20][..], &[0x0a, 0x7f, 1], &[0x0a], &[0x0b, 0x0b], &[]] {
            assert_eq!(check_encoded(data), Ok(()));
        }
    }
}
