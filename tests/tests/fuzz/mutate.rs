//! Mutates messages of any type, and their encoded form.

use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, ReflectMessage, Value};

use crate::generate::Generator;

/// The number of elements to which a rare mutation extends a list.
const MANY: usize = 20_000;

impl Generator<'_> {
    /// Makes one change to the message, or to a message in it.
    pub(crate) fn mutate(&mut self, message: &mut DynamicMessage) {
        if self.chance(60)
            && let Some(inner) = self.inner(message)
        {
            return self.mutate(inner);
        }
        let set: Vec<_> = message.fields().map(|(field, _)| field).collect();
        let (Some(any), set_field) =
            (self.one_of(message.descriptor().fields()), self.one_of(set.clone()))
        else {
            return;
        };
        match (self.random.u32(..8), set_field) {
            (0, Some(field)) => message.clear_field(&field),
            (1 | 2, Some(field)) => self.set_odd(message, &field),
            (3, Some(field)) => swap(message, &field, &set),
            (4 | 5, Some(field)) if field.is_list() => self.mutate_list(message, &field),
            (4 | 5, Some(field)) => nudge(message, &field, 1 << self.random.u32(..64)),
            (6, _) => {
                let value = self.value(&any, 4);
                message.set_field(&any, value);
            }
            _ => self.set_odd(message, &any),
        }
    }

    /// A random message that is nested in the message.
    fn inner<'m>(&mut self, message: &'m mut DynamicMessage) -> Option<&'m mut DynamicMessage> {
        let inner = message.fields_mut().flat_map(|(_, value)| match value {
            Value::Message(inner) => vec![inner],
            Value::List(items) => items.iter_mut().filter_map(Value::as_message_mut).collect(),
            _ => Vec::new(),
        });
        self.one_of(inner)
    }

    fn set_odd(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor) {
        if field.is_map() {
            let value = self.value(field, 4);
            return message.set_field(field, value);
        }
        let odd = self.odd(field);
        match message.get_field_mut(field) {
            Value::List(items) => match self.random.usize(..items.len() + 1) {
                index if index < items.len() => items[index] = odd,
                _ => items.push(odd),
            },
            value => *value = odd,
        }
    }

    fn mutate_list(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor) {
        let Value::List(items) = message.get_field_mut(field) else { return };
        let length = items.len();
        match self.random.u32(..5) {
            0 => items.truncate(self.random.usize(..=length)),
            1 if length > 1 => items.swap(self.random.usize(..length), self.random.usize(..length)),
            2 if length > 0 => {
                let copy = items[self.random.usize(..length)].clone();
                let is_small = !matches!(field.kind(), Kind::Message(_) | Kind::Bytes);
                let copies = match self.random.u32(..20) {
                    0 if is_small => MANY,
                    0..4 => 200,
                    _ => 1,
                };
                items.extend(std::iter::repeat_n(copy, copies));
            }
            3 if length > 0 => _ = items.remove(self.random.usize(..length)),
            _ => items.clear(),
        }
    }

    /// Corrupts the bytes of an encoded message.
    pub(crate) fn corrupt(&mut self, bytes: &mut Vec<u8>) {
        // Messages with the URL of the test's directory are not corrupted, so that servers write no
        // files elsewhere.
        let url = self.facts.url.as_bytes();
        if bytes.windows(url.len()).any(|part| part == url) {
            return;
        }
        let at = self.random.usize(..=bytes.len());
        match self.random.u32(..6) {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_within(at..),
            2 => bytes.insert(at, self.random.u8(..)),
            3 => bytes.splice(at..at, std::iter::repeat_n(0xff, 11)).for_each(drop),
            _ => {
                for _ in 0..self.random.usize(1..4) {
                    let index = self.random.usize(..bytes.len().max(1));
                    if let Some(byte) = bytes.get_mut(index) {
                        *byte ^= 1 << self.random.u32(..8);
                    }
                }
            }
        }
    }
}

/// Exchanges the value with that of another field of the same type.
fn swap(message: &mut DynamicMessage, field: &FieldDescriptor, set: &[FieldDescriptor]) {
    let is_alike = |other: &&FieldDescriptor| {
        *other != field && other.kind() == field.kind() && other.is_list() == field.is_list()
    };
    if let Some(other) = set.iter().find(is_alike) {
        let (one, two) =
            (message.get_field(field).into_owned(), message.get_field(other).into_owned());
        message.set_field(field, two);
        message.set_field(other, one);
    }
}

/// Flips a bit of a number, or moves it by one.
fn nudge(message: &mut DynamicMessage, field: &FieldDescriptor, bit: u64) {
    match message.get_field_mut(field) {
        Value::U32(number) => *number ^= (bit as u32).max(1),
        Value::U64(number) => *number = number.wrapping_add(bit),
        Value::I32(number) => *number ^= bit as i32,
        Value::I64(number) => *number = number.wrapping_sub(bit as i64),
        Value::F32(number) => *number = f32::from_bits(number.to_bits() ^ (bit as u32).max(1)),
        Value::F64(number) => *number = f64::from_bits(number.to_bits() ^ bit),
        Value::Bool(flag) => *flag = !*flag,
        Value::EnumNumber(number) => *number = number.wrapping_add(1),
        Value::String(text) if !text.starts_with("file:") => _ = text.pop(),
        Value::Bytes(bytes) => bytes.truncate(bytes.len().saturating_sub(1)),
        _ => {}
    }
}
