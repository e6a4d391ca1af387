//! The machine, date and version of a measurement. Each row of JSON carries them, so that results
//! of several machines are not mixed up.

use std::{fmt, fs, num::NonZero, thread, time::SystemTime};

use serde::{Deserialize, Serialize};

/// The machine that a benchmark ran on, and when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Model of the processors.
    processor: String,
    /// Number of processors that the benchmark could use.
    cores: usize,
    /// `true` if a hypervisor provides the processors.
    is_virtual: bool,
    memory_bytes: u64,
    /// Models of the NVIDIA GPUs.
    gpus: Vec<String>,
    /// The day of the measurement in UTC, such as 2026-11-29.
    pub(crate) date: String,
    /// Version of ZeroShard.
    pub(crate) version: String,
}

impl Machine {
    /// Returns this machine, today. On Linux it is described by `/proc`.
    pub(crate) fn this() -> Self {
        let [cpuinfo, meminfo] = ["/proc/cpuinfo", "/proc/meminfo"]
            .map(|path| fs::read_to_string(path).unwrap_or_default());
        let now = prost_types::Timestamp::from(SystemTime::now()).to_string();
        Self {
            processor: processor(&cpuinfo),
            cores: thread::available_parallelism().map_or(1, NonZero::get),
            is_virtual: field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            memory_bytes: memory_bytes(&meminfo),
            gpus: gpus(),
            date: now.chars().take_while(|&character| character != 'T').collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Describes the machine, without date and version.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, is_virtual, memory_bytes, gpus, .. } = self;
        let kind = if *is_virtual { "virtual core" } else { "core" };
        let plural = if *cores == 1 { "" } else { "s" };
        let memory = *memory_bytes as f64 / f64::from(1 << 30);
        write!(f, "{processor}, {cores} {kind}{plural}, {memory:.0} GiB of memory")?;
        match &gpus[..] {
            [] => Ok(()),
            [gpu] => write!(f, ", {gpu}"),
            [gpu, ..] => write!(f, ", {} GPUs ({gpu})", gpus.len()),
        }
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim())
}

/// The model of the processors, or the architecture where `/proc/cpuinfo` does not name the model.
fn processor(cpuinfo: &str) -> String {
    let model = field(cpuinfo, "model name").unwrap_or(std::env::consts::ARCH);
    model.replace("(R)", "").replace("(TM)", "")
}

/// The memory of the machine; 0 if `/proc/meminfo` does not state it.
fn memory_bytes(meminfo: &str) -> u64 {
    let total = field(meminfo, "MemTotal").and_then(|total| total.strip_suffix(" kB"));
    total.and_then(|kib| kib.parse::<u64>().ok()).map_or(0, |kib| kib.saturating_mul(1024))
}

/// The models of the GPUs that the driver of NVIDIA lists.
fn gpus() -> Vec<String> {
    let folders = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let texts =
        folders.filter_map(|folder| fs::read_to_string(folder.path().join("information")).ok());
    texts.filter_map(|text| field(&text, "Model").map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described_by_proc() {
        let cpuinfo =
            "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.7GHz\nflags\t\t: fpu\n";
        assert_eq!(processor(cpuinfo), "Intel Xeon CPU @ 2.7GHz");
        assert_eq!(processor("Features : fp asimd"), std::env::consts::ARCH);
        assert_eq!(memory_bytes("MemTotal:       24683656 kB\nMemFree: 1 kB"), 24_683_656 << 10);
        assert_eq!(memory_bytes("MemTotal: many"), 0);
        let date = Machine::this().date;
        assert!(date.len() == 10 && date.as_str() > "2026-11-28", "{date}");
    }

    #[test]
    fn it_is_shown_in_words() {
        let machine = Machine {
            processor: "AMD EPYC".to_owned(),
            cores: 2,
            is_virtual: true,
            memory_bytes: 24_683_656 << 10,
            gpus: vec![],
            date: String::new(),
            version: String::new(),
        };
        assert_eq!(machine.to_string(), "AMD EPYC, 2 virtual cores, 24 GiB of memory");
        let gpus = vec!["NVIDIA H200".to_owned(); 2];
        let other = Machine { cores: 1, is_virtual: false, gpus, ..machine };
        assert_eq!(other.to_string(), "AMD EPYC, 1 core, 24 GiB of memory, 2 GPUs (NVIDIA H200)");
    }
}
