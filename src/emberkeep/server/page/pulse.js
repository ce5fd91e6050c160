// What the server does, as it happens.

import { ofModel, stream } from "./api.js";
import { useEffect, useState } from "./vendor/preact-htm.js";

export const SHOWN = 120; // moments that are remembered
const RETRY_MS = 2000;
export const REUSED = ["hot", "warm", "cold", "remote", "moved"];

/** What the server does now, and the tokens between each moment and the one before. */
export function usePulse(model = "") {
  const [now, setNow] = useState(null);
  const [moments, setMoments] = useState([]);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    let before = null;
    const watch = async () => {
      while (!leaving.signal.aborted) {
        try {
          for await (const { data } of stream(ofModel("/v1/events", model), undefined, leaving.signal)) {
            setProblem("");
            setNow(data);
            const moment = before && momentOf(before.tokens, data.tokens);
            before = data;
            if (moment) setMoments((known) => [...known.slice(1 - SHOWN), moment]);
          }
        } catch (error) {
          if (leaving.signal.aborted) return;
          setProblem(error.message);
        }
        before = null; // the server may be another one now
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    };
    watch();
    return () => leaving.abort();
  }, []);
  return { now, moments, problem };
}

function momentOf(before, after) {
  const reused = REUSED.reduce((sum, tier) => sum + after[tier] - before[tier], 0);
  const evaluated = after.evaluated - before.evaluated;
  return reused > 0 || evaluated > 0 ? { reused, evaluated } : null;
}
