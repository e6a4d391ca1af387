//! BLAKE3 hashes as they appear in manifests.

use blake3::Hash;
use zeroshard_model::{Error, Result};

/// Reads a hash from a message.
///
/// # Errors
/// [`Error::Internal`] for a hash of another length.
pub(crate) fn of_message(bytes: &[u8]) -> Result<Hash> {
    let cause = || format!("a hash has {} bytes, not {}", bytes.len(), blake3::OUT_LEN);
    Hash::from_slice(bytes).map_err(|_| Error::Internal { cause: cause() })
}

/// Serializes a hash as hexadecimal digits.
pub(crate) mod hex {
    use blake3::Hash;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&hash.to_hex())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
        Hash::from_hex(String::deserialize(from)?).map_err(D::Error::custom)
    }
}

/// Serializes a list of hashes as hexadecimal digits.
pub(crate) mod hex_list {
    use blake3::Hash;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(hashes: &[Hash], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(hashes.iter().map(|hash| hash.to_hex().to_string()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Hash>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        texts.iter().map(|text| Hash::from_hex(text).map_err(D::Error::custom)).collect()
    }
}
