//! The text of a module as kernels and statements.

/// A kernel as text.
#[derive(Debug)]
pub(crate) struct Parsed<'a> {
    pub(crate) name: &'a str,
    /// The name, alignment and size of each parameter.
    pub(crate) parameters: Vec<(&'a str, usize, usize)>,
    /// The name, alignment and size of each array in shared memory.
    pub(crate) shared: Vec<(&'a str, usize, usize)>,
    pub(crate) statements: Vec<Statement<'a>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Statement<'a> {
    Label(&'a str),
    Instruction {
        /// The name of a predicate, and the value that it must have.
        guard: Option<(&'a str, bool)>,
        /// The parts of the name, which dots separate.
        name: Vec<&'a str>,
        operands: Vec<&'a str>,
    },
}

/// The kernels of a module.
///
/// # Errors
/// A description of the first part that is not known.
pub(crate) fn kernels(text: &str) -> Result<Vec<Parsed<'_>>, String> {
    if !text.lines().any(|line| line.trim_start().starts_with(".version")) {
        return Err("the text has no .version".to_owned());
    }
    let parts = text.split(".entry").skip(1);
    parts.map(kernel).collect()
}

fn kernel(text: &str) -> Result<Parsed<'_>, String> {
    let (name, rest) = text.split_once('(').ok_or("a kernel without parameters")?;
    let (parameters, rest) = rest.split_once(')').ok_or("parameters without an end")?;
    let (_, rest) = rest.split_once('{').ok_or("a kernel without a body")?;
    let parameters = parameters.split(',').map(str::trim).filter(|of| !of.is_empty());
    let mut parsed = Parsed {
        name: name.trim(),
        parameters: parameters.map(|of| variable(of)).collect::<Result<_, _>>()?,
        shared: Vec::new(),
        statements: Vec::new(),
    };
    let mut body = rest;
    loop {
        body = skip_blank(body);
        if body.starts_with('}') {
            return Ok(parsed);
        }
        let end = body.find([';', ':']).ok_or("a statement without an end")?;
        let (statement, rest) = (&body[..end], &body[end + 1..]);
        match statement.trim() {
            label if body[end..].starts_with(':') => {
                parsed.statements.push(Statement::Label(label))
            }
            directive if directive.starts_with(".shared") => {
                parsed.shared.push(variable(directive)?);
            }
            // Registers are known by their names, and pragmas are for optimisers.
            directive if directive.starts_with(".reg") || directive.starts_with(".pragma") => {}
            directive if directive.starts_with('.') => return Err(format!("unknown: {directive}")),
            instruction => parsed.statements.push(self::instruction(instruction)?),
        }
        body = rest;
    }
}

/// Skips white space and comments.
fn skip_blank(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        match text.strip_prefix("//") {
            Some(comment) => text = comment.split_once('\n').map_or("", |(_, rest)| rest),
            None => return text,
        }
    }
}

/// `.param .align 4 .b8 name[24]` or `.param .u64 name`: the name, the alignment and the size.
fn variable(text: &str) -> Result<(&str, usize, usize), String> {
    let unknown = || format!("unknown variable: {text}");
    let mut words = text.split_whitespace().skip(1);
    let mut alignment = None;
    let mut kind = words.next().ok_or_else(unknown)?;
    if kind == ".align" {
        alignment = Some(words.next().and_then(|of| of.parse().ok()).ok_or_else(unknown)?);
        kind = words.next().ok_or_else(unknown)?;
    }
    let size = bytes_of(kind.trim_start_matches('.')).ok_or_else(unknown)?;
    let name = words.next().ok_or_else(unknown)?;
    let (name, count) = match name.split_once('[') {
        None => (name, 1),
        Some((name, count)) => (name, count.trim_end_matches(']').parse().map_err(|_| unknown())?),
    };
    Ok((name, alignment.unwrap_or(size), size * count))
}

/// The size of a type in bytes.
pub(crate) fn bytes_of(kind: &str) -> Option<usize> {
    let bits: usize = kind.get(1..)?.parse().ok()?;
    matches!(bits, 8 | 16 | 32 | 64).then_some(bits / 8)
}

fn instruction(text: &str) -> Result<Statement<'_>, String> {
    let (guard, rest) = match text.strip_prefix('@') {
        None => (None, text),
        Some(rest) => {
            let (guard, rest) =
                rest.split_once(char::is_whitespace).ok_or("a guard without an instruction")?;
            let (guard, expected) = match guard.strip_prefix('!') {
                Some(guard) => (guard, false),
                None => (guard, true),
            };
            (Some((guard, expected)), rest.trim_start())
        }
    };
    let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    Ok(Statement::Instruction {
        guard,
        name: name.split('.').collect(),
        operands: split_operands(operands),
    })
}

/// Splits at the commas that are not in braces.
fn split_operands(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let parts = text.split(|c| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        .version 8.4
        .visible .entry first(
            .param .align 4 .b8 first_param_0[24],
            .param .u64 first_param_1
        )
        {
            .reg .pred %p<2>; // a comment
            .shared .align 8 .b8 lanes[1024];
            // another comment; with a semicolon
            ld.param.v2.f32 {%f1, %f2}, [first_param_0+8];
        $L__BB0_1:
            @!%p1 bra $L__BB0_1;
            ret;
        }
        .visible .entry second() { ret; }";

    #[test]
    fn kernels_are_split_into_statements() {
        let [first, second] = &kernels(TEXT).unwrap()[..] else { panic!("there are two") };
        assert_eq!((first.name, second.name), ("first", "second"));
        assert_eq!(first.parameters, [("first_param_0", 4, 24), ("first_param_1", 8, 8)]);
        assert_eq!(first.shared, [("lanes", 8, 1024)]);
        let [load, label, branch, end] = &first.statements[..] else { panic!("there are four") };
        let Statement::Instruction { guard: None, name, operands } = load else {
            panic!("{load:?}")
        };
        assert_eq!(name, &["ld", "param", "v2", "f32"]);
        assert_eq!(operands, &["{%f1, %f2}", "[first_param_0+8]"]);
        assert_eq!(label, &Statement::Label("$L__BB0_1"));
        let guarded = matches!(branch, Statement::Instruction { guard: Some(("%p1", false)), .. });
        assert!(guarded, "{branch:?}");
        assert_eq!(
            end,
            &Statement::Instruction { guard: None, name: vec!["ret"], operands: vec![] }
        );
    }

    #[test]
    fn text_that_is_not_ptx_is_refused() {
        for text in ["", "a module", ".version 8.4 .entry f(", ".version 8.4 .entry f() { ret"] {
            let read = kernels(text);
            assert!(read.is_err() || text.is_empty(), "{text}: {read:?}");
        }
        assert!(kernels(".version 8.4 .entry f() { .local .b8 x[8]; ret; }").is_err());
    }
}
