// What the server tells, asked for again when something has happened.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";

const EVERY_MS = 1500;
const SHARE = 4; // of the time that an answer took, between two of them

/** What `read` gives, and again when `beat` has changed, but not too often; at once when `urgent` has. */
export function useFresh(read, beat, urgent) {
  const [fresh, setFresh] = useState({ told: null, error: null, of: urgent });
  const last = useRef({ due: 0, urgent: null }).current;
  useEffect(() => {
    const ask = async () => {
      const begun = Date.now();
      last.due = begun + EVERY_MS;
      const answer = await read().then((told) => ({ told, error: null, of: urgent }), (error) => ({ error }));
      last.due = Date.now() + Math.max(EVERY_MS, SHARE * (Date.now() - begun));
      if (urgent === last.urgent) setFresh((before) => ({ ...before, ...answer }));
    };
    const wait = urgent === last.urgent ? Math.max(last.due - Date.now(), 0) : 0;
    last.urgent = urgent;
    const timer = setTimeout(ask, wait);
    return () => clearTimeout(timer);
  }, [beat, urgent]);
  return fresh;
}
