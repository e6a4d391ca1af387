//! The training text. It is read from a folder, divided into training and held-out text, and
//! encoded.
//!
//! The result depends only on the files, not on the order in which the file system lists them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ignore::WalkBuilder;
use thiserror::Error;

/// The extensions of the files that are read. Files named README or Makefile are read too.
const EXTENSIONS: [&str; 33] = [
    "adoc", "c", "cc", "cpp", "css", "go", "h", "hpp", "html", "java", "jl", "js", "kt", "lua",
    "md", "org", "php", "pl", "proto", "py", "pyi", "rb", "rs", "rst", "scala", "sh", "sql",
    "swift", "toml", "ts", "txt", "yaml", "yml",
];
/// The maximum size of a file in bytes. Larger files usually contain data, not prose or source
/// code.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The number of bytes after which no further files are read. It is more than a small model can
/// use.
const MAX_BYTES: usize = 16 << 20;
/// One character in this many is held out: the last tenth of every file.
const HELD_OUT: usize = 10;
/// A character that is less frequent than 1 in this many is replaced by [`REPLACEMENT`].
const RARE: usize = 50_000;
/// The maximum size of the vocabulary, including the replacement: a character is encoded as a byte.
const MAX_CHARACTERS: usize = 256;
/// The replacement for all rare characters.
pub const REPLACEMENT: char = '\u{fffd}';

/// An error of the training text.
#[derive(Debug, Error)]
pub enum Error {
    /// The path is not a folder.
    #[error("--data {0:?} is not a folder; choose a folder with text files")]
    NoFolder(PathBuf),
    /// The folder contains no text files.
    #[error(
        "--data {folder:?} has no text files: UTF-8, at most 1 MiB, not excluded by a \
         .gitignore, and with one of the extensions {}",
        EXTENSIONS.join(", ")
    )]
    NoFiles {
        /// The folder.
        folder: PathBuf,
    },
    /// The text is too short for one window of training and one of held-out text.
    #[error(
        "--data {folder:?} has {found} characters in {files} text files; a context of {context} \
         needs at least {needed}: add text or reduce --context"
    )]
    TooLittle {
        /// The folder.
        folder: PathBuf,
        /// The number of files that were read.
        files: usize,
        /// The number of characters in them.
        found: usize,
        /// The value of --context.
        context: usize,
        /// The minimum number of characters.
        needed: usize,
    },
}

/// The characters of the text. The number of a character is its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// The characters in the order of their code points, followed by the replacement.
    characters: Vec<char>,
}

impl Vocabulary {
    /// Creates a vocabulary of the characters of `text` that are not rare, and the replacement.
    fn of(text: &str) -> Self {
        let mut counts: BTreeMap<char, usize> = BTreeMap::new();
        for character in text.chars() {
            *counts.entry(character).or_default() += 1;
        }
        counts.remove(&REPLACEMENT);
        let total: usize = counts.values().sum();
        let mut common: Vec<(char, usize)> =
            counts.into_iter().filter(|(_, count)| count * RARE >= total).collect();
        // The sort is stable: among equally frequent characters, those with lower code points are
        // kept.
        common.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        common.truncate(MAX_CHARACTERS - 1);
        let mut characters: Vec<char> =
            common.into_iter().map(|(character, _)| character).collect();
        characters.sort_unstable();
        characters.push(REPLACEMENT);
        Self { characters }
    }

    /// The number of characters, 1 to 256.
    pub fn size(&self) -> usize {
        self.characters.len()
    }

    /// Converts characters into their numbers.
    pub fn encode(&self, text: &str) -> Vec<u8> {
        let (replacement, common) =
            self.characters.split_last().expect("a vocabulary contains the replacement");
        debug_assert_eq!(*replacement, REPLACEMENT);
        text.chars()
            .map(|character| common.binary_search(&character).unwrap_or(common.len()))
            .map(|number| u8::try_from(number).expect("there are at most 256 characters"))
            .collect()
    }

    /// Converts numbers, which must be less than `size()`, into characters.
    pub fn decode(&self, numbers: &[u8]) -> String {
        numbers.iter().map(|&number| self.characters[usize::from(number)]).collect()
    }
}

/// The encoded text, divided into training and held-out text.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The vocabulary of the encoding.
    pub vocabulary: Vocabulary,
    /// The training text: the beginnings of all files, concatenated.
    pub train: Vec<u8>,
    /// The held-out text: the ends of all files, concatenated.
    pub held_out: Vec<u8>,
    /// The number of files that were read.
    pub files: usize,
}

impl Corpus {
    /// Reads the text files of a folder and its subfolders, in the order of their paths.
    ///
    /// # Errors
    /// [`Error::NoFolder`], [`Error::NoFiles`] and [`Error::TooLittle`].
    pub fn read(folder: &Path, context: usize) -> Result<Self, Error> {
        if !folder.is_dir() {
            return Err(Error::NoFolder(folder.to_owned()));
        }
        let files = read_files(folder);
        if files.is_empty() {
            return Err(Error::NoFiles { folder: folder.to_owned() });
        }
        let corpus = Self::from_files(&files);
        // Each part needs a window and the character after it.
        if corpus.train.len() <= context || corpus.held_out.len() <= context {
            return Err(Error::TooLittle {
                folder: folder.to_owned(),
                files: corpus.files,
                found: corpus.train.len() + corpus.held_out.len(),
                context,
                needed: (context + 1) * HELD_OUT + HELD_OUT * corpus.files,
            });
        }
        Ok(corpus)
    }

    /// Divides each text into training and held-out text, and encodes both.
    fn from_files(files: &[String]) -> Self {
        let (mut train, mut held_out) = (String::new(), String::new());
        for file in files {
            let count = file.chars().count();
            let held = count.div_ceil(HELD_OUT);
            let cut = file.char_indices().nth(count - held).map_or(file.len(), |(byte, _)| byte);
            train.push_str(&file[..cut]);
            held_out.push_str(&file[cut..]);
        }
        let vocabulary = Vocabulary::of(&train);
        Self {
            train: vocabulary.encode(&train),
            held_out: vocabulary.encode(&held_out),
            vocabulary,
            files: files.len(),
        }
    }

    /// The unigram entropy of the text in nats per character. It is the loss of a model that knows
    /// only the frequency of each character.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary.size()];
        for &character in self.train.iter().chain(&self.held_out) {
            counts[usize::from(character)] += 1;
        }
        let total = counts.iter().sum::<u64>() as f64;
        let used = counts.iter().filter(|&&count| count > 0).map(|&count| count as f64 / total);
        -used.map(|share| share * share.ln()).sum::<f64>()
    }
}

fn read_files(folder: &Path) -> Vec<String> {
    let mut walk = WalkBuilder::new(folder);
    // The result must not depend on the user's git configuration, or on whether the folder is a git
    // repository.
    walk.require_git(false).git_global(false).git_exclude(false).sort_by_file_path(Ord::cmp);
    let mut texts = Vec::new();
    let mut bytes = 0;
    for entry in walk.build().filter_map(Result::ok) {
        let small =
            entry.metadata().is_ok_and(|data| data.is_file() && data.len() <= MAX_FILE_BYTES);
        if !small || !is_text(entry.path()) {
            continue;
        }
        // Files that are unreadable or not UTF-8 are skipped.
        if let Ok(text) = std::fs::read_to_string(entry.path()) {
            bytes += text.len();
            if !text.is_empty() {
                texts.push(text);
            }
        }
        if bytes >= MAX_BYTES {
            break;
        }
    }
    texts
}

fn is_text(path: &Path) -> bool {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) => EXTENSIONS.contains(&extension.to_ascii_lowercase().as_str()),
        None => path.file_name().is_some_and(|name| name == "README" || name == "Makefile"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn files_are_read_in_the_order_of_their_paths() {
        let folder = folder(&[("b.md", "bbbbbbbbbb"), ("a/x.rs", "aaaaaaaaaa"), ("c.bin", "cccc")]);
        let corpus = Corpus::read(folder.path(), 1).unwrap();
        assert_eq!(corpus.files, 2);
        assert_eq!(corpus.vocabulary.decode(&corpus.train), "aaaaaaaaabbbbbbbbb");
        assert_eq!(corpus.vocabulary.decode(&corpus.held_out), "ab");
    }

    #[test]
    fn ignored_files_and_files_that_are_not_utf8_are_skipped() {
        let folder = folder(&[
            (".gitignore", "/out\n"),
            ("out/a.txt", &"o".repeat(99)),
            ("b.txt", &"b".repeat(99)),
        ]);
        fs::write(folder.path().join("c.txt"), [0xff, 0xfe, 0x00]).unwrap();
        let corpus = Corpus::read(folder.path(), 4).unwrap();
        assert_eq!(corpus.files, 1);
        assert_eq!(corpus.train.len() + corpus.held_out.len(), 99);
    }

    #[test]
    fn a_missing_folder_is_refused() {
        let error = Corpus::read(Path::new("no/such/folder"), 4).unwrap_err();
        assert!(matches!(error, Error::NoFolder(_)), "{error}");
    }

    #[test]
    fn a_folder_without_text_is_refused() {
        let folder = folder(&[("a.bin", "text in a file that is not text")]);
        assert!(matches!(Corpus::read(folder.path(), 4), Err(Error::NoFiles { .. })));
    }

    #[test]
    fn the_error_for_too_little_text_names_the_minimum() {
        let short = folder(&[("a.txt", &"a".repeat(100))]);
        let Err(Error::TooLittle { needed, found: 100, .. }) = Corpus::read(short.path(), 64)
        else {
            panic!("100 characters are too few for windows of 64");
        };
        let enough = folder(&[("a.txt", &"a".repeat(needed))]);
        assert!(Corpus::read(enough.path(), 64).is_ok());
    }

    #[test]
    fn rare_characters_become_the_replacement() {
        let text = format!("{}ä", "ab".repeat(RARE));
        let corpus = Corpus::from_files(&[format!("ä{text}")]);
        assert_eq!(corpus.vocabulary.size(), 3);
        assert_eq!(corpus.vocabulary.decode(&corpus.train[..3]), "\u{fffd}ab");
        assert_eq!(corpus.vocabulary.encode("bzä"), [1, 2, 2]);
    }

    #[test]
    fn a_vocabulary_fits_in_a_byte() {
        let text: String = (0..1000).filter_map(|i| char::from_u32(0x4e00 + i)).collect();
        let vocabulary = Vocabulary::of(&text);
        assert_eq!(vocabulary.size(), 256);
        assert_eq!(vocabulary.encode(&text).len(), 1000);
    }

    #[test]
    fn entropy_of_two_equally_common_characters_is_one_bit() {
        let corpus = Corpus::from_files(&["ab".repeat(500)]);
        assert!((corpus.unigram_entropy() - 2f64.ln()).abs() < 1e-12);
    }
}
