-- How a Program gets a place on a rank, uses it, and loses it.

-- Without a job: the caller dispatches one. `seat`: the rank's process; `held`: what the engine may still hold of it,
-- which counts as its own again.
local function activate(at, p, seat, held)
  local id = p[0].id
  leave_waiting(at, p)
  p.state, p.status, p.was, p.rounds, p.activated_ms, p.inflight = 'active', 'acting', 1, 0, at.ms, 0
  p.seat, p.epoch = seat, redis.call('HINCRBY', at.placement, 'epoch', 1)
  p.yielded, p.mark = nil, nil
  redis.call('ZADD', at.active, at.ms, id)
  redis.call('HINCRBY', at.book, 'active', 1)
  leaving(at, id, -held)
end

-- A job of an active Program goes to the rank.
local function dispatch(at, p, ticket, job)
  local token, queued_ms, _, expected = opened(ticket)
  local entry = redis.call('XADD', at.stream, '*', 'job', token, 'program', p[0].id)
  redis.call('HSET', job, 'entry', entry, 'epoch', p.epoch, 'dispatched_ms', at.ms)
  if expected then p.reserved, p.reserver = expected, token end
  p.inflight, p.status, p.ttl_ms, p.auto_ms = p.inflight + 1, 'reasoning', nil, nil
  if p.inflight == 1 then
    redis.call('HINCRBY', at.book, 'reasoning', 1)
    redis.call('ZREM', at.timers, 'ttl:' .. p[0].id, 'retention:' .. p[0].id)
  end
  measured(at, 'queue_wait_ms', math.max(at.ms - queued_ms, 0))
  account(at, p)
end

-- One of its jobs is no longer with the rank.
local function returned(at, p, token)
  p.inflight = p.inflight - 1
  if p.inflight == 0 then redis.call('HINCRBY', at.book, 'reasoning', -1) end
  if p.inflight == 0 or p.reserver == token then p.reserved, p.reserver = nil, nil end
end

-- It has no job on the rank, and leaves its place; its KV is leaving, or is gone with the rank.
local function vacate(at, p)
  local id, kept, lost = p[0].id, p.private or 0, is_stale(at, p)
  redis.call('ZREM', at.active, id)
  redis.call('HINCRBY', at.book, 'active', -1)
  redis.call('ZREM', at.timers, 'ttl:' .. id, 'retention:' .. id)
  p.state, p.seat, p.mark, p.ttl_ms, p.auto_ms = 'paused', nil, nil, nil, nil
  account(at, p)
  if not lost then return leaving(at, id, kept) end
  p.epoch, p.impact_us = redis.call('HINCRBY', at.placement, 'epoch', 1), nil
  redis.call('HINCRBY', at.book, 'moved', kept) -- nothing has changed for the process that is there now
end

local function pause(at, p, reason)
  vacate(at, p)
  if reason == 'ttl_expired' then
    sampled(at.segments, struct.pack('<H', math.min(p.segment or 0, 65535)), p.win)
    p.segment = 0
  end
  p.yielded = reason == 'max_segment_yield' and 1 or nil
  event(at, 'pause', p, reason)
  settle_paused(at, p)
end
