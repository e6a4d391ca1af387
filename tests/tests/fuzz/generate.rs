//! Generates messages of any type from their descriptors. Most values are valid and are chosen from
//! [`Facts`] by the name of the field. Some are at the limits of their type.

use std::collections::HashMap;

use fastrand::Rng;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, OneofDescriptor, Value,
};
use zeroshard_model::{Optimizer, TensorSpec};
use zeroshard_proto::pb;
use zeroshard_tests::synthetic;

use crate::facts::{Facts, Member};

/// The depth at which fields of message types are omitted.
const DEPTH: usize = 6;

/// Generates messages on behalf of a rank.
pub(crate) struct Generator<'a> {
    pub(crate) random: Rng,
    pub(crate) member: Member,
    pub(crate) facts: &'a Facts,
}

impl Generator<'_> {
    /// Returns true with this probability in percent.
    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.random.u32(..100) < percent
    }

    pub(crate) fn one_of<T>(&mut self, items: impl IntoIterator<Item = T>) -> Option<T> {
        self.random.choice(items.into_iter().collect::<Vec<_>>())
    }

    /// Generates a message with most of its fields set.
    pub(crate) fn message(&mut self, of: &MessageDescriptor, depth: usize) -> DynamicMessage {
        if of.full_name() == "zeroshard.v1.JobSpec" && self.chance(90) {
            return self.spec(of);
        }
        let mut message = DynamicMessage::new(of.clone());
        let is_choice = |oneof: &OneofDescriptor| !oneof.is_synthetic();
        let choices: Vec<_> = of.oneofs().filter(is_choice).collect();
        let chosen: Vec<_> = choices.iter().map(|oneof| self.one_of(oneof.fields())).collect();
        for field in of.fields() {
            let is_left_out = match field.containing_oneof().filter(is_choice) {
                Some(_) => !chosen.contains(&Some(field.clone())),
                None => !self.chance(if field.supports_presence() { 60 } else { 95 }),
            };
            let is_deep = depth >= DEPTH && matches!(field.kind(), Kind::Message(_));
            if !is_left_out && !is_deep {
                let value = self.value(&field, depth);
                message.set_field(&field, value);
            }
        }
        message
    }

    /// Generates a value for the field.
    pub(crate) fn value(&mut self, field: &FieldDescriptor, depth: usize) -> Value {
        if field.is_map() {
            let Kind::Message(entry) = field.kind() else { return Value::Map(HashMap::new()) };
            let keys = ["lr", "eps", "weight_decay", "beta1", "momentum", "unknown", ""];
            let mut entries = HashMap::new();
            for _ in 0..self.random.usize(..3) {
                let key = MapKey::String(self.one_of(keys).unwrap_or_default().to_owned());
                entries.insert(key, self.single(&entry.map_entry_value_field(), depth));
            }
            return Value::Map(entries);
        }
        if !field.is_list() {
            return self.single(field, depth);
        }
        let length = match self.random.u32(..10) {
            0..4 => 0,
            4..9 => self.random.usize(1..4),
            _ => self.random.usize(..40),
        };
        Value::List((0..length).map(|_| self.single(field, depth)).collect())
    }

    /// Generates a single value of the type of the field.
    pub(crate) fn single(&mut self, field: &FieldDescriptor, depth: usize) -> Value {
        match field.kind() {
            Kind::Message(of) => Value::Message(self.message(&of, depth + 1)),
            Kind::String => Value::String(self.text(field.name())),
            Kind::Bytes => Value::Bytes(self.payload().into()),
            Kind::Bool => Value::Bool(self.random.bool()),
            Kind::Double => Value::F64(self.random.f64()),
            Kind::Float => Value::F32(self.random.f32()),
            Kind::Enum(of) => {
                let value = self.one_of(of.values());
                Value::EnumNumber(value.map_or(0, |value| value.number()))
            }
            kind => integer(&kind, self.number(field.name())),
        }
    }

    /// Generates a number for a field of this name. It is valid if the name is known.
    fn number(&mut self, name: &str) -> u64 {
        let Member { job_id, rank, lease, world, epoch, version, attempt, .. } = self.member;
        match name {
            "job_id" => job_id,
            "lease" => lease,
            "epoch" => epoch,
            "rank" | "from" | "to" | "ranks" => rank.into(),
            "world" => world.into(),
            "version" | "step" | "since" => version,
            "attempt" | "rested" => attempt.into(),
            "wait_ms" | "limit_ms" => self.random.u64(1..300),
            "applied" | "offset" | "length" | "elements" => self.random.u64(..8),
            "idle_timeout_ms" | "every_ms" => self.random.u64(1000..5000),
            _ => self.random.u64(..4),
        }
    }

    /// Generates a valid text for a field of this name.
    fn text(&mut self, name: &str) -> String {
        match name {
            "job" => self.member.job.clone(),
            "url" => self.facts.url.clone(),
            // No process listens at this address.
            "address" => "127.0.0.1:9".to_owned(),
            "service" => "readiness".to_owned(),
            "optimizer_state" => {
                self.one_of(["exp_avg", "momentum_buffer", "sum"]).unwrap_or_default().to_owned()
            }
            _ => format!("fuzz/{}", self.random.u32(..8)),
        }
    }

    fn payload(&mut self) -> Vec<u8> {
        let numel = self.random.usize(..64);
        synthetic::values(self.random.u64(..), numel)
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect()
    }

    /// Generates the specification of a job with a name that no other caller needs.
    fn spec(&mut self, of: &MessageDescriptor) -> DynamicMessage {
        let optimizers = ["sgd", "adamw", "adafactor", "lamb", "asgd", "average", "nadam"];
        let name = self.one_of(optimizers).unwrap_or_default();
        let optimizer: Optimizer = name.parse().unwrap();
        let mut tensors = match self.chance(20) && !optimizer.needs_whole_tensors() {
            true => synthetic::kinds(&optimizer),
            false => vec![TensorSpec::new("w", [10, 100]), TensorSpec::new("b", [3])],
        };
        if optimizer.needs_whole_tensors() {
            tensors.iter_mut().for_each(|tensor| tensor.policy = zeroshard_model::Policy::Whole);
        }
        let name = format!("fuzz/{}", self.random.u32(..8));
        let world = self.random.u32(1..4);
        let spec = synthetic::job(&name, world, optimizer, tensors).unwrap();
        let mut message = DynamicMessage::new(of.clone());
        message.transcode_from(&pb::JobSpec::from(&spec)).unwrap();
        message
    }

    /// Generates an unusual value of the type of the field: the limits of numbers, long and odd
    /// texts, and unknown enum values.
    pub(crate) fn odd(&mut self, field: &FieldDescriptor) -> Value {
        let choice = self.random.usize(..);
        match field.kind() {
            Kind::Message(of) => Value::Message(DynamicMessage::new(of)),
            Kind::String => Value::String(self.odd_text()),
            Kind::Bytes => {
                let length = [0, 1, 3, 4, 5, 4096, 100_000][choice % 7];
                let byte = self.random.u8(..);
                Value::Bytes(vec![byte; length].into())
            }
            Kind::Bool => Value::Bool(self.random.bool()),
            Kind::Double => Value::F64(FLOATS[choice % FLOATS.len()]),
            Kind::Float => Value::F32(FLOATS[choice % FLOATS.len()] as f32),
            Kind::Enum(_) => Value::EnumNumber([-1, 0, 5, 6, 99, i32::MAX, i32::MIN][choice % 7]),
            kind => {
                let limit = NUMBERS[choice % NUMBERS.len()];
                let number = match self.random.u32(..3) {
                    0 => limit.wrapping_add(1),
                    1 => limit.wrapping_sub(1),
                    _ => limit,
                };
                integer(&kind, number)
            }
        }
    }

    fn odd_text(&mut self) -> String {
        let length = [200, 201, 1024, 70_000][self.random.usize(..4)];
        match self.random.u32(..12) {
            0 => String::new(),
            1 => "x".repeat(length),
            2 => format!("fuzz/{}", "ü".repeat(length)),
            3 => "fuzz/\0\r\n\t\u{7f}".to_owned(),
            4 => "fuzz/../../..".to_owned(),
            5 => "%s%n{}\u{202e}\u{feff}".to_owned(),
            6 => "127.0.0.1:0".to_owned(),
            7 => "[::1]:99999".to_owned(),
            8 => format!("{}/{}", self.facts.url, self.random.u32(..4)),
            // A URL with an unknown scheme.
            9 => "scheme://host/path".to_owned(),
            10 => self.facts.bystander.job.clone(),
            _ => self.member.job.clone(),
        }
    }
}

const FLOATS: [f64; 11] = [
    0.0,
    -0.0,
    -1.0,
    1e-310,
    f64::MIN_POSITIVE,
    f64::MAX,
    f64::MIN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1e38,
];

const NUMBERS: [u64; 14] = [
    0,
    1,
    64,
    1 << 16,
    1 << 22,
    1 << 24,
    1 << 30,
    1 << 31,
    1 << 32,
    1 << 44,
    1 << 62,
    1 << 63,
    u64::MAX / 4,
    u64::MAX,
];

fn integer(kind: &Kind, number: u64) -> Value {
    match kind {
        Kind::Uint32 | Kind::Fixed32 => Value::U32(number as u32),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(number),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(number as i32),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(number as i64),
        other => panic!("{other:?} is not an integer"),
    }
}
