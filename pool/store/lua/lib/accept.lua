-- How a job is accepted, over what submit and arrive declare by the same names.

-- The reply of a submit that changes nothing, or only remembers that it was refused; nil where the job may come in. Its
-- input blocks are then held. `many`: how many Programs its tenant has, where it would be one too many.
local function refusal(at_ms, many)
  if redis.call('EXISTS', job) == 1 then return {'duplicate', at_ms} end
  local over = redis.call('GET', tombstone)
  if over then return {over == 'refused' and over or 'expired', at_ms} end
  if at_ms > not_after then return {'late', at_ms} end
  local why, again = closed(model)
  local held = redis.call('ZCARD', index)
  local code = held + n > cap and 'full'
  if not code and own_cap > 0 then
    held = owned(tenants, index, tenant, own_cap - n)
    code = held + n > own_cap and 'crowded'
  end
  if not code and many then code, held = 'many', many end
  if why then code = 'closed' end
  if code then
    if claimed == 1 then redis.call('SET', tombstone, 'refused', 'PX', remember) end
    return why and {code, at_ms, why, again} or {code, at_ms, held}
  end
  return blocks[1] and hold(token, blocks, data)
end

-- Record, index, tenants and timers. `score`: of the index; `order`: the time in us. Returns its turn.
local function enlist(score, at_ms, order)
  local turn = table.concat({flow, '1' .. order, token, terms}, ':')
  redis.call('HSET', job, 'state', 'queued', 'entry', '0-0', 'created_ms', at_ms, 'turn', turn, unpack(fields))
  redis.call('ZADD', index, score, token)
  if own_cap > 0 then redis.call('ZADD', tenants, 0, tenant .. ':' .. token) end
  for choice = 1, n - 1 do
    redis.call('ZADD', index, 0, token .. '#' .. choice)
    if own_cap > 0 then redis.call('ZADD', tenants, 0, tenant .. ':' .. token .. '#' .. choice) end
  end
  redis.call('ZADD', timers, at_ms + queue_timeout, 'queue:' .. token)
  if deadline > 0 then redis.call('ZADD', timers, at_ms + deadline, 'deadline:' .. token) end
  if reader > 0 then redis.call('ZADD', timers, at_ms + reader, 'reader:' .. token) end
  return turn
end
