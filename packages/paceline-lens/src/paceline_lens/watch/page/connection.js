// `Connection`: the page's stream of events. It comes back by itself, and rests while nobody looks at the page.

const RETRY_MS = 3000;

export class Connection {
  /**
   * @param take     called with a list of [path, value] and whether everything before is to be forgotten
   * @param changed  called when the connection comes or goes
   */
  constructor(take, changed) {
    this.take = take;
    this.changed = changed;
    this.names = null;
    this.lostAt = null; // when the connection went, in milliseconds; null while it is there
    this.source = null;
    this.retry = 0;
    // A browser has six connections to one host: pages in the background leave them to those that are seen.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  /** Asks for the series of these names; null for those that are shown where nobody has chosen. */
  ask(names) {
    this.names = names;
    this.start();
  }

  start() {
    this.stop();
    const query = new URLSearchParams((this.names ?? []).map((name) => ["name", name]));
    this.source = new EventSource(`events?${query}`);
    this.source.addEventListener("snapshot", (event) => this.take(JSON.parse(event.data), true));
    this.source.addEventListener("change", (event) => this.take(JSON.parse(event.data), false));
    this.source.addEventListener("open", () => this.setLost(false));
    this.source.addEventListener("error", () => {
      this.setLost(true);
      // The browser tries again by itself, but not where the server has refused.
      if (this.source?.readyState === EventSource.CLOSED) this.retry = setTimeout(() => this.start(), RETRY_MS);
    });
  }

  stop() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  setLost(isLost) {
    if (isLost && this.lostAt === null) this.lostAt = Date.now();
    if (!isLost) this.lostAt = null;
    this.changed();
  }
}
