//! Statements as operations.

use std::collections::HashMap;

use super::{
    Access, Action, Kernel, Operation, Space,
    alu::Alu,
    operands::{Registers, split_address},
    parse::{Parsed, Statement, bytes_of},
};

/// The address of the first array in shared memory, and the size of the gaps between arrays: an
/// access that is a little out of bounds is not one to another array.
const GAP: usize = 1 << 12;

/// Decodes a kernel.
///
/// # Errors
/// A description of the first statement that is not known.
pub(crate) fn kernel(parsed: &Parsed<'_>) -> Result<Kernel, String> {
    let mut labels = HashMap::new();
    let mut next = 0;
    for statement in &parsed.statements {
        match statement {
            Statement::Label(label) => drop(labels.insert(*label, next)),
            Statement::Instruction { name, operands, .. } => next += count(name, operands),
        }
    }

    let mut decoder = Decoder { labels, ..Decoder::default() };
    let mut parameters = Vec::new();
    let mut end = 0usize;
    for (name, alignment, size) in &parsed.parameters {
        let offset = end.next_multiple_of(*alignment);
        end = offset + size;
        parameters.push((offset, *size));
        decoder.parameters.insert(name, offset);
    }
    let mut shared = Vec::new();
    let mut address = GAP;
    for (name, _, size) in &parsed.shared {
        decoder.shared.insert(name, address as u64);
        shared.push((address as u64, *size));
        address = (address + size).next_multiple_of(GAP) + GAP;
    }

    for statement in &parsed.statements {
        if let Statement::Instruction { guard, name, operands } = statement {
            let guard = guard.map(|(name, expected)| {
                decoder.registers.register(name).map(|register| (register, expected))
            });
            let guard = guard.transpose()?;
            let before = decoder.actions.len();
            decoder
                .instruction(name, operands)
                .map_err(|e| format!("{} {}: {e}", name.join("."), operands.join(", ")))?;
            debug_assert_eq!(decoder.actions.len() - before, count(name, operands));
            decoder.guards.resize(decoder.actions.len(), guard);
        }
    }
    // A kernel without `ret` at its end would run into nothing.
    decoder.push(Action::Exit);
    decoder.guards.push(None);

    let operations = decoder.guards.into_iter().zip(decoder.actions);
    let operations = operations.map(|(guard, action)| Operation { guard, action }).collect();
    Ok(Kernel {
        name: parsed.name.to_owned(),
        operations,
        registers: decoder.registers.count(),
        constants: decoder.registers.constants(),
        specials: decoder.registers.specials(),
        parameters,
        shared,
        sites: decoder.sites,
    })
}

/// The number of operations of an instruction: one for each element of a vector.
fn count(name: &[&str], operands: &[&str]) -> usize {
    match name {
        ["ld", ..] => elements(operands.first().unwrap_or(&"")).count(),
        _ => 1,
    }
}

/// The names in `{a, b}`, or the only name.
fn elements(text: &str) -> impl Iterator<Item = &str> {
    text.trim_start_matches('{').trim_end_matches('}').split(',').map(str::trim)
}

#[derive(Default)]
struct Decoder<'a> {
    registers: Registers<'a>,
    labels: HashMap<&'a str, usize>,
    /// The offsets of parameters.
    parameters: HashMap<&'a str, usize>,
    /// The addresses of arrays in shared memory.
    shared: HashMap<&'a str, u64>,
    guards: Vec<Option<(u16, bool)>>,
    actions: Vec<Action>,
    sites: usize,
}

impl<'a> Decoder<'a> {
    fn push(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn instruction(&mut self, name: &[&'a str], operands: &[&'a str]) -> Result<(), String> {
        let kind = name.last().copied().unwrap_or("");
        match (name, operands) {
            (["ret" | "exit"], []) => self.push(Action::Exit),
            (["bra", ..], [label]) => {
                let to = *self.labels.get(label).ok_or("unknown label")?;
                self.push(Action::Branch(to));
            }
            (["bar", "sync"], ["0"]) => self.push(Action::Barrier),
            (["ld", "param", ..], [to, from]) => {
                let (parameter, offset) = split_address(from)?;
                let start = *self.parameters.get(parameter).ok_or("unknown parameter")?;
                let size = bytes_of(kind).ok_or("unknown type")?;
                let offset = start.checked_add_signed(offset as isize).ok_or("bad offset")?;
                for (i, to) in elements(to).enumerate() {
                    let to = self.registers.register(to)?;
                    self.push(Action::Parameter { to, offset: offset + i * size, size });
                }
            }
            (["ld", space, ..], [register, at]) => {
                self.access(Access::Load, space, kind, register, at)?;
            }
            (["st", space, ..], [at, register]) => {
                self.access(Access::Store, space, kind, register, at)?;
            }
            (_, [to, from @ ..]) if (1..=3).contains(&from.len()) => {
                let alu = Alu::named(&name.join(".")).ok_or("unknown instruction")?;
                let to = self.registers.register(to)?;
                let mut registers = [0; 3];
                for (register, from) in registers.iter_mut().zip(from) {
                    *register = self.registers.value(from, kind, &self.shared)?;
                }
                self.push(Action::Compute { alu, to, from: registers });
            }
            _ => return Err("unknown instruction".to_owned()),
        }
        Ok(())
    }

    fn access(
        &mut self,
        access: Access,
        space: &str,
        kind: &str,
        register: &'a str,
        at: &'a str,
    ) -> Result<(), String> {
        let space = match space {
            "global" => Space::Global,
            "shared" => Space::Shared,
            _ => return Err("unknown memory".to_owned()),
        };
        let size = bytes_of(kind).ok_or("unknown type")?;
        let register = self.registers.value(register, kind, &HashMap::new())?;
        let at = self.registers.address(at, &self.shared)?;
        let site = self.sites;
        self.sites += 1;
        self.push(Action::Access { access, space, size, register, at, site });
        Ok(())
    }
}
