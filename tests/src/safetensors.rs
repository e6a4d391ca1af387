//! Reads the files of a model.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

/// Returns the tensors of all safetensors files in a directory, each with its dtype.
///
/// # Panics
/// If a file is incomplete or malformed.
pub fn read(directory: &Path) -> BTreeMap<String, (String, Vec<u8>)> {
    let mut tensors = BTreeMap::new();
    let files = fs::read_dir(directory).expect("the directory exists");
    let files = files.map(|entry| entry.expect("an entry").path());
    for file in files.filter(|file| file.extension().is_some_and(|of| of == "safetensors")) {
        let contents = fs::read(file).expect("a file");
        let (length, rest) = contents.split_at(8);
        let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&rest[..length]).expect("a header of JSON");
        let header: BTreeMap<String, Value> = header;
        let mut end = 0;
        for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let offset = |of: usize| tensor["data_offsets"][of].as_u64().expect("offsets") as usize;
            let values = rest[length + offset(0)..length + offset(1)].to_vec();
            let dtype = tensor["dtype"].as_str().expect("a dtype").to_owned();
            end = end.max(offset(1));
            tensors.insert(name.clone(), (dtype, values));
        }
        assert_eq!(length + end, rest.len(), "the file is complete");
    }
    tensors
}
