//! The tensors of a model: from safetensors files, or from the configuration of a model of Hugging
//! Face.

use std::{
    fmt::Display,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use zeroshard_client::Result;
use zeroshard_model::Error;

/// The maximum size of a file with JSON, and of the header of a safetensors file.
const MAX_JSON: u64 = 100 << 20;

/// The name and the shape of a tensor.
pub(crate) type Shape = (String, Vec<u64>);

fn unreadable(path: &Path, cause: impl Display) -> Error {
    Error::refused(format!("cannot read model file {}: {cause}", path.display()))
}

/// The tensors in a safetensors file, or in all files of a directory with
/// `model.safetensors.index.json`.
///
/// # Errors
/// [`Error::Refused`] for files that cannot be read or have another format.
pub(crate) fn of_safetensors(path: &Path) -> Result<Vec<Shape>> {
    if !path.is_dir() {
        return header(path);
    }
    let index = path.join("model.safetensors.index.json");
    if !index.exists() {
        return header(&path.join("model.safetensors"));
    }
    let json = json(&index)?;
    let missing = || unreadable(&index, "it has no weight_map");
    let files = json["weight_map"].as_object().ok_or_else(missing)?;
    let mut files: Vec<PathBuf> =
        files.values().filter_map(Value::as_str).map(|file| path.join(file)).collect();
    files.sort();
    files.dedup();
    let tensors = files.iter().map(|file| header(file)).collect::<Result<Vec<_>>>()?;
    Ok(tensors.concat())
}

/// The tensors in the header of a safetensors file: its length as 8 bytes, and JSON.
fn header(path: &Path) -> Result<Vec<Shape>> {
    let failed = |cause: std::io::Error| unreadable(path, cause);
    let mut file = File::open(path).map_err(failed)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    let size = file.metadata().map_err(failed)?.len();
    if length > MAX_JSON.min(size.saturating_sub(8)) {
        let cause = format!("a safetensors file cannot have a header of {length} bytes");
        return Err(unreadable(path, cause));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(failed)?;
    let header: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|cause| unreadable(path, cause))?;
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let shape = |(name, tensor): (String, Value)| {
        let sizes = tensor["shape"].as_array().map(|sizes| sizes.iter().map(Value::as_u64));
        match sizes.and_then(Iterator::collect::<Option<Vec<u64>>>) {
            Some(shape) => Ok((name, shape)),
            None => Err(unreadable(path, format!("tensor {name:?} has no shape"))),
        }
    };
    tensors.map(shape).collect()
}

fn json(path: &Path) -> Result<Value> {
    let failed = |cause: std::io::Error| unreadable(path, cause);
    let mut text = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_JSON).read_to_end(&mut text)).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|cause| unreadable(path, cause))
}

/// The tensors of the model that a `config.json` of Hugging Face describes.
///
/// # Errors
/// [`Error::Refused`] for another kind of model, and a missing size.
pub(crate) fn of_config(path: &Path) -> Result<Vec<Shape>> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let config = Config { values: json(&path)?, path: &path };
    match config.values["model_type"].as_str().unwrap_or_default() {
        "gpt2" => config.gpt2(),
        "llama" | "mistral" | "qwen2" => config.llama(),
        other => {
            let cause = format!(
                "its model_type is {other:?}, and gpt2, llama, mistral and qwen2 are known; pass \
                 the weights with --safetensors"
            );
            Err(unreadable(&path, cause))
        }
    }
}

struct Config<'a> {
    values: Value,
    path: &'a Path,
}

impl Config<'_> {
    fn size(&self, key: &str) -> Result<u64> {
        let missing = || unreadable(self.path, format!("it has no {key}, a size of at most 2^31"));
        self.optional(key).ok_or_else(missing)
    }

    fn optional(&self, key: &str) -> Option<u64> {
        self.values[key].as_u64().filter(|&size| size <= 1 << 31)
    }

    fn layers(&self, key: &str) -> Result<u64> {
        let layers = self.size(key)?;
        let many = || unreadable(self.path, format!("it has {layers} layers; 10,000 are allowed"));
        (layers <= 10_000).then_some(layers).ok_or_else(many)
    }

    fn is(&self, key: &str) -> bool {
        self.values[key].as_bool() == Some(true)
    }

    /// Radford et al. 2019. The output layer is tied to the embedding.
    fn gpt2(&self) -> Result<Vec<Shape>> {
        let (width, layers) = (self.size("n_embd")?, self.layers("n_layer")?);
        let hidden = self.optional("n_inner").unwrap_or(4 * width);
        let mut tensors = vec![
            ("wte.weight".to_owned(), vec![self.size("vocab_size")?, width]),
            ("wpe.weight".to_owned(), vec![self.size("n_positions")?, width]),
        ];
        for layer in 0..layers {
            let linear = [
                ("attn.c_attn", width, 3 * width),
                ("attn.c_proj", width, width),
                ("mlp.c_fc", width, hidden),
                ("mlp.c_proj", hidden, width),
            ];
            for (name, inputs, outputs) in linear {
                tensors.push((format!("h.{layer}.{name}.weight"), vec![inputs, outputs]));
                tensors.push((format!("h.{layer}.{name}.bias"), vec![outputs]));
            }
            for name in ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"] {
                tensors.push((format!("h.{layer}.{name}"), vec![width]));
            }
        }
        tensors.extend(["ln_f.weight", "ln_f.bias"].map(|name| (name.to_owned(), vec![width])));
        Ok(tensors)
    }

    /// Touvron et al. 2023, and the models with the same layers.
    fn llama(&self) -> Result<Vec<Shape>> {
        let (width, hidden) = (self.size("hidden_size")?, self.size("intermediate_size")?);
        let (vocabulary, heads) = (self.size("vocab_size")?, self.size("num_attention_heads")?);
        let head = self.optional("head_dim").unwrap_or(width / heads.max(1));
        let queries = heads * head;
        let keys = self.optional("num_key_value_heads").unwrap_or(heads) * head;
        let is_qwen = self.values["model_type"] == "qwen2";
        let (has_bias, has_output_bias) =
            (is_qwen || self.is("attention_bias"), self.is("attention_bias"));
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocabulary, width])];
        for layer in 0..self.layers("num_hidden_layers")? {
            let linear = [
                ("self_attn.q_proj", queries, width, has_bias),
                ("self_attn.k_proj", keys, width, has_bias),
                ("self_attn.v_proj", keys, width, has_bias),
                ("self_attn.o_proj", width, queries, has_output_bias),
                ("mlp.gate_proj", hidden, width, false),
                ("mlp.up_proj", hidden, width, false),
                ("mlp.down_proj", width, hidden, false),
            ];
            for (name, outputs, inputs, has_bias) in linear {
                let name = format!("model.layers.{layer}.{name}");
                tensors.push((format!("{name}.weight"), vec![outputs, inputs]));
                tensors.extend(has_bias.then(|| (format!("{name}.bias"), vec![outputs])));
            }
            for name in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push((format!("model.layers.{layer}.{name}.weight"), vec![width]));
            }
        }
        tensors.push(("model.norm.weight".to_owned(), vec![width]));
        if !self.is("tie_word_embeddings") {
            tensors.push(("lm_head.weight".to_owned(), vec![vocabulary, width]));
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn parameters(config: &Value) -> u64 {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let tensors = of_config(directory.path()).unwrap();
        tensors.iter().map(|(_, shape)| shape.iter().product::<u64>()).sum()
    }

    /// The expected numbers are those of transformers 5.23:
    /// `sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())`.
    #[test]
    fn the_number_of_parameters_is_that_of_the_model() {
        let gpt2 = json!({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
            "vocab_size": 50257, "n_positions": 1024});
        assert_eq!(parameters(&gpt2), 124_439_808);
        let llama2 = json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000});
        assert_eq!(parameters(&llama2), 6_738_415_616);
        let mistral = json!({"model_type": "mistral", "hidden_size": 4096, "vocab_size": 32000,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8});
        assert_eq!(parameters(&mistral), 7_241_732_096);
        let qwen = json!({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "vocab_size": 151_936, "tie_word_embeddings": true});
        assert_eq!(parameters(&qwen), 494_032_768);
    }

    #[test]
    fn a_wrong_file_is_refused_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("model.safetensors");
        for wrong in [&b"short"[..], &[255; 64], &[2, 0, 0, 0, 0, 0, 0, 0, b'[', b']']] {
            fs::write(&file, wrong).unwrap();
            let error = of_safetensors(directory.path()).unwrap_err().to_string();
            assert!(error.contains("model.safetensors"), "{error}");
        }
        for config in [json!({"model_type": "bert"}), json!({"model_type": "gpt2", "n_embd": 8})] {
            fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
            assert!(of_config(directory.path()).is_err(), "{config}");
        }
    }

    #[test]
    fn the_headers_of_all_files_of_an_index_are_read() {
        let directory = tempfile::tempdir().unwrap();
        for (file, name) in [("a.safetensors", "x"), ("b.safetensors", "y")] {
            let header = json!({name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                "__metadata__": {"format": "pt"}})
            .to_string();
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 24]];
            fs::write(directory.path().join(file), bytes.concat()).unwrap();
        }
        let index = json!({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}});
        let path = directory.path().join("model.safetensors.index.json");
        fs::write(path, index.to_string()).unwrap();
        let expected = vec![("x".to_owned(), vec![2, 3]), ("y".to_owned(), vec![2, 3])];
        assert_eq!(of_safetensors(directory.path()).unwrap(), expected);
    }
}
