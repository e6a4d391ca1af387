//! The configuration file. Its values become flags, so that flags, environment and file have one
//! parser.

use std::{any::TypeId, error::Error as _, ffi::OsString, fs, path::Path};

use clap::{
    ArgMatches, Args, Command,
    parser::ValueSource::{CommandLine, EnvVariable},
};
use toml::{Table, Value, de};

use super::{All, Common, Coordinator, Error, Shard};

/// The sections that the file may have.
pub(super) const SECTIONS: [&str; 4] = ["common", "coordinator", "shard", "all"];

/// The types of values that are numbers in the file.
const NUMBERS: [TypeId; 4] =
    [TypeId::of::<u32>(), TypeId::of::<u64>(), TypeId::of::<usize>(), TypeId::of::<f64>()];

/// Returns the values in [common] and [`section`] of `file` as flags, without those that
/// `matches` has from the command line or the environment.
///
/// # Errors
/// [`Error::File`] and [`Error::UnknownSection`].
pub(crate) fn flags(
    file: &Path,
    section: &str,
    matches: &ArgMatches,
) -> Result<Vec<OsString>, Error> {
    let sections = read(file)?;
    let role = match section {
        "coordinator" => Coordinator::augment_args(Command::new("coordinator")),
        "shard" => Shard::augment_args(Command::new("shard")),
        _ => All::augment_args(Command::new("all")),
    };
    let mut flags = Vec::new();
    for command in [Common::augment_args(Command::new("common")), role] {
        let section = command.get_name();
        let values = match sections.get(section) {
            Some(Value::Table(values)) => values,
            Some(_) => return Err(Error::File(format!("`{section}` is not a section"))),
            None => continue,
        };
        for (key, value) in values {
            let is_set = |key| matches!(matches.value_source(key), Some(CommandLine | EnvVariable));
            let wrong = |text| Error::File(format!("[{section}] `{key}`: {text}"));
            let flag = flag(&command, key, value).map_err(wrong)?;
            // The two sources of the token count as one value.
            let is_token = matches!(key.as_str(), "token" | "token_file");
            let is_overridden =
                is_set(key) || is_token && (is_set("token") || is_set("token_file"));
            flags.extend(flag.filter(|_| !is_overridden).map(OsString::from));
        }
    }
    Ok(flags)
}

/// Returns `key = value` as a valid flag of `command`; `None` for `false`.
fn flag(command: &Command, key: &str, value: &Value) -> Result<Option<String>, String> {
    let Some(arg) = command.get_arguments().find(|arg| arg.get_id() == key) else {
        let keys: Vec<_> = command.get_arguments().map(|arg| arg.get_id().as_str()).collect();
        return Err(format!("unknown key; the known keys are {}", keys.join(", ")));
    };
    let parsed = arg.get_value_parser().type_id();
    let is_number = NUMBERS.iter().any(|number| parsed == *number);
    let is_boolean = parsed == TypeId::of::<bool>();
    let text = match value {
        Value::Boolean(value) if is_boolean => {
            return Ok(value.then(|| format!("--{}", key.replace('_', "-"))));
        }
        Value::Integer(value) if is_number => value.to_string(),
        Value::Float(value) if is_number => value.to_string(),
        Value::String(value) if !is_number && !is_boolean => value.clone(),
        // The value may be a token, which is not shown.
        _ if is_boolean => return Err("the value is not true or false".to_owned()),
        _ if is_number => return Err("the value is not a number".to_owned()),
        _ => return Err("the value is not a text in quotes".to_owned()),
    };
    let flag = format!("--{}={text}", key.replace('_', "-"));
    match command.clone().no_binary_name(true).try_get_matches_from([&flag]) {
        Ok(_) => Ok(Some(flag)),
        Err(error) => Err(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
    }
}

fn read(file: &Path) -> Result<Table, Error> {
    let text = fs::read_to_string(file)
        .map_err(|error| Error::File(format!("{}: {error}", file.display())))?;
    let sections: Table =
        text.parse().map_err(|error: de::Error| Error::File(without_source(&error)))?;
    match sections.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
        Some(section) => {
            Err(Error::UnknownSection { file: file.to_owned(), section: section.clone() })
        }
        None => Ok(sections),
    }
}

/// Returns the parser's message without the quoted line of the file, which may contain the token.
/// The message also names the position.
fn without_source(error: &de::Error) -> String {
    let quoted = |line: &&str| {
        line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit()).starts_with('|')
    };
    error.to_string().lines().filter(|line| !quoted(line)).collect::<Vec<_>>().join("\n")
}
