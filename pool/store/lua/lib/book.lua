-- The book of a rank, and what every verb that changes something of it tells. `at`: the keys of the rank, and `rank`, its
-- id, and `ms`, the time, which each verb sets first.
-- GROUP at waiting order waiters active book leaving stream timers dirty events placement requests continuity segments owners figures

-- Tokens that an active Program needs for itself, as pool/rules/programs/tokens.py has them.
local function private_of(p)
  return math.max(p.ctx - (p.shared or 0), 0) + (p.reserved or p.buf)
end

-- Brings the ledger up to what the Program needs now: nothing unless it is active.
local function account(at, p)
  local private = p.state == 'active' and private_of(p) or 0
  local change = private - (p.private or 0)
  if change ~= 0 then
    redis.call('HINCRBY', at.book, 'tokens', change)
    redis.call('HINCRBY', at.book, 'moved', change)
  end
  p.private = private
end

-- KV that an engine still holds of a Program without a place. Its process is told of more: the room is needed.
local function leaving(at, id, change)
  if change == 0 then return end
  if change > 0 then redis.call('PUBLISH', 'gp:node:' .. at.rank, '*') end
  if redis.call('HINCRBY', at.leaving, id, change) == 0 then redis.call('HDEL', at.leaving, id) end
  redis.call('HINCRBY', at.book, 'leaving', change)
  redis.call('HINCRBY', at.book, 'moved', change)
end

-- Whether the rank that the Program has its place on has lost it: it is away, or another process.
local function is_stale(at, p)
  return p.state == 'active' and p.seat ~= redis.call('HGET', at.book, 'incarnation')
end

-- Whether a job that is with the rank of its stale Program may still end there: its process leaves, and finishes first.
local function may_end(at, p)
  return p.seat ~= nil and p.seat == redis.call('HGET', at.book, 'closing')
end

-- What its Programs are paused for.
local function lost_why(at)
  return redis.call('HGET', at.book, 'why') or 'health_failover'
end

-- Plans made before this no longer hold, and somebody should make a new one. A rank that is gone gets no new book by the
-- end of what was bound to it.
local function changed(at)
  if redis.call('EXISTS', at.book, at.waiting) == 0 then return 0 end
  redis.call('ZADD', at.dirty, 'NX', at.ms, at.rank)
  return redis.call('HINCRBY', at.book, 'version', 1)
end

local function event(at, what, p, reason)
  redis.call('XADD', at.events, 'MAXLEN', '~', 10000, '*', 'what', what, 'reason', reason, 'program', p[0].id,
    'generation', p.gen, 'epoch', p.epoch or 0, 'rank', p.rank, 'tokens', p.private or 0)
  redis.call('HINCRBY', at.placement, what .. ':' .. reason, 1)
end
