//! The last events on the status page of a coordinator, and the filter of their severity.

use std::{fmt::Write as _, time::SystemTime};

use zeroshard_coordinator::operators::{
    history::{Happened, Severity},
    overview::{Overview, View},
};

use super::{
    html::{Text, age, count},
    view::Link,
};

/// Draws the section of the events.
pub(super) fn section(html: &mut String, overview: &Overview, now: SystemTime) {
    html.push_str("<section aria-labelledby=events><h2 id=events>Events</h2>");
    filter(html, overview);
    if overview.events.is_empty() {
        let which = match overview.view.events {
            Severity::Info => "No event",
            Severity::Warning => "No warning and no error",
            Severity::Error => "No error",
        };
        let _ = write!(
            html,
            "<p class=empty>{which} has occurred since this coordinator started.</p></section>"
        );
        return;
    }
    html.push_str("<ol class=events id=scroll-events tabindex=0 aria-labelledby=events>");
    for Happened { at, severity, text } in &overview.events {
        let ago = now.duration_since(*at).unwrap_or_default();
        let _ = write!(
            html,
            "<li><time>{} UTC <small>{}</small></time>{}<span>{}</span></li>",
            clock(*at),
            age(ago),
            badge(*severity),
            Text(text)
        );
    }
    html.push_str("</ol></section>");
}

/// Links to the events of each severity and above.
fn filter(html: &mut String, overview: &Overview) {
    html.push_str("<nav class=filter aria-label='Severity of events'>");
    let names = ["all", "warnings and errors", "errors"];
    for ((severity, name), number) in Severity::ALL.into_iter().zip(names).zip(overview.counts) {
        let current = if severity == overview.view.events { " aria-current=true" } else { "" };
        let link = Link(View { events: severity, ..overview.view });
        let number = count(number as u64);
        let _ = write!(
            html,
            "<a href='{link}#events' id='filter-{}'{current}>{name} <small>{number}</small></a>",
            severity.label()
        );
    }
    html.push_str("</nav>");
}

fn badge(severity: Severity) -> String {
    let class = match severity {
        Severity::Info => "idle",
        Severity::Warning => "warn",
        Severity::Error => "bad",
    };
    format!("<b class='state {class}'>{}</b>", severity.label())
}

/// The time of day in UTC, such as `13:05:59`.
fn clock(at: SystemTime) -> String {
    let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds % 3600 / 60, seconds % 60)
}
