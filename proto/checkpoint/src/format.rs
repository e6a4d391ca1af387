//! The keys of a slice, and the header of a file (safetensors,
//! <https://huggingface.co/docs/safetensors>).

use std::ops::Range;

use serde_json::{Value, json};
use zeroshard_model::{DType, JobSpec, checkpoint::Part};

/// The length of the number in front of the header.
const PREFIX: usize = 8;
/// Headers are filled with spaces to a multiple of this length, so that tensors are aligned.
const ALIGNMENT: usize = 8;

/// The size of the header at which a file of many small tensors ends. Readers of safetensors refuse
/// headers of more than 100 MB.
pub(crate) const HEADER_BYTES: usize = 16 << 20;

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    /// The name of the type in the format.
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    /// The size in bytes.
    pub(crate) bytes: usize,
}

/// The parts of slice number `index`, in the order in which they are stored.
pub(crate) fn parts(spec: &JobSpec, index: usize) -> Vec<(Part, Entry)> {
    let slice = spec.manifest.slices()[index];
    let tensor = spec.manifest.tensor_of(index);
    let entry = |part: &str, dtype: DType, numel: usize| Entry {
        key: format!("{part}/{}/{}", tensor.name, slice.offset),
        dtype: name(dtype),
        shape: vec![numel as u64],
        bytes: numel * dtype.size(),
    };
    if spec.optimizer_of(slice.tensor).is_none() {
        return vec![(Part::Values, entry("values", tensor.dtype, slice.numel))];
    }
    let mut parts = vec![(Part::Values, entry("master", DType::F32, slice.numel))];
    for (position, (state, shape)) in spec.state_of(slice.tensor).into_iter().enumerate() {
        let numel = shape.numel(slice.numel);
        if numel > 0 {
            parts.push((Part::State(position), entry(&state, DType::F32, numel)));
        }
    }
    parts
}

/// The size of all parts of slice number `index`, in bytes.
pub(crate) fn slice_bytes(spec: &JobSpec, index: usize) -> u64 {
    parts(spec, index).iter().map(|(_, part)| part.bytes as u64).sum()
}

pub(crate) fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
    }
}

/// The maximum size of the text of a header with this tensor alone. Keys contain no control
/// characters.
pub(crate) fn header_bytes(entry: &Entry) -> usize {
    const FIXED: usize = r#""":{"data_offsets":[,],"dtype":"BF16","shape":[]},"#.len();
    const DIGITS: usize = 20;
    FIXED + (2 + entry.shape.len()) * (DIGITS + 1) + 2 * entry.key.len()
}

/// The beginning of a file with these tensors: the length of the header, and the header. Equal
/// tensors give equal bytes.
pub(crate) fn header<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<u8> {
    header_with(&[], entries)
}

/// A header like [`header`], with metadata for programs that read it.
pub(crate) fn header_with<'a>(
    metadata: &[(&str, &str)],
    entries: impl IntoIterator<Item = &'a Entry>,
) -> Vec<u8> {
    let mut end = 0;
    let tensors = entries.into_iter().map(|Entry { key, dtype, shape, bytes }| {
        let start = end;
        end += bytes;
        let key = Value::from(key.as_str());
        let shape = Value::from(shape.as_slice());
        format!(r#"{key}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    });
    let metadata: Vec<_> =
        metadata.iter().map(|&(key, text)| format!("{}:{}", json!(key), json!(text))).collect();
    let metadata =
        (!metadata.is_empty()).then(|| format!(r#""__metadata__":{{{}}}"#, metadata.join(",")));
    let fields: Vec<String> = metadata.into_iter().chain(tensors).collect();
    let mut text = format!("{{{}}}", fields.join(",")).into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    let mut header = Vec::with_capacity(PREFIX + text.len());
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text);
    header
}

/// The positions of tensors of these sizes behind a header of `header` bytes.
pub(crate) fn ranges(header: u64, sizes: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
    let mut end = header;
    let range = |size| {
        let start = end;
        end = start.saturating_add(size);
        start..end
    };
    sizes.into_iter().map(range).collect()
}
