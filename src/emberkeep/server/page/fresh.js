// What the server tells, asked for again when something has happened.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";

const EVERY_MS = 1500;
const REST = 2; // times as long as an answer took, until the next

/** What `read` gives, and again when `beat` has changed, but not too often; at once when `urgent` has. */
export function useFresh(read, beat, urgent) {
  const [fresh, setFresh] = useState({ told: null, error: null });
  const last = useRef({ due: 0, urgent: null }).current;
  useEffect(() => {
    const ask = async () => {
      const begun = Date.now();
      last.due = begun + EVERY_MS;
      const answer = await read().then((told) => ({ told, error: null }), (error) => ({ error }));
      last.due = Date.now() + Math.max(EVERY_MS, REST * (Date.now() - begun));
      if (urgent === last.urgent) setFresh((before) => ({ ...before, ...answer }));
    };
    const wait = urgent === last.urgent ? Math.max(last.due - Date.now(), 0) : 0;
    last.urgent = urgent;
    const timer = setTimeout(ask, wait);
    return () => clearTimeout(timer);
  }, [beat, urgent]);
  return fresh;
}
