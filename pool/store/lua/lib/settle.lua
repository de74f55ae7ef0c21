-- What a completed request tells of its Program. `o`: numbers by name (pool/store/placements.py); absent: not known.
local function settle_request(at, p, o, sample)
  -- As ContextEstimate in pool/rules/programs/tokens.py: only the second of two smaller ones in a row lowers it.
  if o.context >= p.ctx or p.falls then
    p.ctx, p.falls = o.context, nil
  else
    p.falls = 1
  end
  if o.shared then p.shared, p.fresh_ms = measured(at, 'shared_prefix_tokens', o.shared), o.fresh end
  local growth = o.prompt - (p.prompt or 0)
  if growth > 0 and growth < (p.prompt or 0) then measured(at, 'context_growth_tokens', growth) end
  measured(at, 'cache_miss_impact_ms', o.impact / 1000)
  p.prompt, p.finish_ms, p.impact_us = o.prompt, at.ms, o.impact
  p.completed, p.rounds, p.segment = (p.completed or 0) + 1, p.rounds + o.round, (p.segment or 0) + o.round
  if sample ~= '' then sampled(at.requests, sample, p.win) end
end

-- Tokens a byte of prompts that came through this door, as next_coefficient in pool/rules/programs/tokens.py.
local function learn_coefficient(coefficients, job, prompt_tokens)
  local door, bytes = unpack(redis.call('HMGET', job, 'kind', 'prompt_bytes'))
  if not bytes or prompt_tokens == 0 then return end
  local before = tonumber(redis.call('HGET', coefficients, door) or 0.25)
  local found = math.min(math.max(prompt_tokens / bytes, 0.01), 4)
  redis.call('HSET', coefficients, door, string.format('%.9g', 0.9 * before + 0.1 * found))
end
