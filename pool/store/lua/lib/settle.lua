-- What a completed request tells of its Program. `o`: numbers by name (pool/store/placements.py); absent: not known.
local function settle_request(at, p, o, sample)
  -- As ContextEstimate in pool/rules/programs/tokens.py: only the second of two smaller ones in a row lowers it.
  if o.context >= p.ctx or p.falls then
    p.ctx, p.falls = o.context, nil
  else
    p.falls = 1
  end
  if o.shared then p.shared, p.fresh_ms = o.shared, o.fresh end
  p.prompt, p.finish_ms, p.impact_us = o.prompt, at.ms, o.impact
  p.completed, p.rounds, p.segment = (p.completed or 0) + 1, p.rounds + o.round, (p.segment or 0) + o.round
  if sample ~= '' then
    redis.call('RPUSH', at.requests, sample)
    redis.call('LTRIM', at.requests, -p.win, -1)
  end
end
