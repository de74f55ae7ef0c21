-- Writes copies of Programs that the store's own verbs have made, as those would have written them: one to a rank, in
-- the state of its model. For the benchmark alone; a server in cluster mode would refuse it.
-- ARGV: what the model's keys begin with, id of the Program that is copied, first number of their names, then id and rank
-- of each.
local prefix, template, number = ARGV[1], ARGV[2], tonumber(ARGV[3])
local function key(rest) return prefix .. rest end
local function fields_of(name)
  local found, flat = {}, redis.call('HGETALL', name)
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end
local function put(name, fields)
  local flat = {}
  for field, value in pairs(fields) do
    flat[#flat + 1] = field
    flat[#flat + 1] = value
  end
  redis.call('HSET', name, unpack(flat))
end
local p = fields_of(key('program:' .. template))
local ticket = redis.call('LINDEX', key('pool:' .. template), 0)
local old = ticket and string.sub(ticket, 1, 32)
local job = old and fields_of(key('job:' .. old))
local function due(zset, member) return tonumber(redis.call('ZSCORE', key(zset), member)) end
local held_ms = due('program-timers', 'ttl:' .. template)
local kept_ms = due('program-timers', 'retention:' .. template)
local queue_ms, accepted = old and due('timers', 'queue:' .. old), old and due('index', old)

local finish_ms, force_ms = tonumber(p.finish_ms), tonumber(p.force_ms)

local function copy(id, rank, at)
  p.name, p.rank = 'agent-' .. at, rank
  -- They ended, and are forced, in two different orders.
  p.finish_ms = string.format('%.0f', finish_ms - at * 7919 % 60000)
  if p.state == 'active' then
    p.epoch = redis.call('HINCRBY', key('placement'), 'epoch', 1)
    redis.call('ZADD', key('active:' .. rank), p.activated_ms, id)
    redis.call('HINCRBY', key('book:' .. rank), 'active', 1)
    redis.call('HINCRBY', key('book:' .. rank), 'tokens', p.private)
    redis.call('ZADD', key('program-timers'), held_ms, 'ttl:' .. id)
  elseif not old then
    redis.call('ZADD', key('program-timers'), kept_ms, 'retention:' .. id)
  else
    -- The ticket begins with the token.
    local token = string.sub(redis.sha1hex(id), 1, 32)
    p.force_ms = string.format('%.0f', force_ms - at * 104729 % 60000)
    p.standing = string.sub(p.standing, 1, 11) .. string.format('%013.0f', 9999999999999 - p.finish_ms)
      .. string.sub(p.standing, 25)
    job.ticket, job.program = token .. string.sub(ticket, 33), id
    job.task_id = string.sub(job.task_id, 1, -33) .. token
    put(key('job:' .. token), job)
    redis.call('ZADD', key('index'), accepted, token)
    redis.call('ZADD', key('timers'), queue_ms, 'queue:' .. token)
    redis.call('RPUSH', key('pool:' .. id), job.ticket)
    redis.call('ZADD', key('waiting:' .. rank), p.force_ms, id)
    redis.call('ZADD', key('order:' .. rank), 0, p.standing .. id)
    -- As lua/lib/waiting.lua shows it.
    local shown = {job.ticket, p.force_ms, p.ctx, p.shared or 0, p.prompt, p.was, p.rounds, p.finish_ms, p.activated_ms,
      p.yielded or 0, ''}
    redis.call('HSET', key('waiters:' .. rank), id, table.concat(shown, ':'))
  end
  put(key('program:' .. id), p)
  redis.call('HINCRBY', key('owners'), p.tenant, 1)
  redis.call('HINCRBY', key('book:' .. rank), 'version', 1)
end
for i = 4, #ARGV, 2 do copy(ARGV[i], ARGV[i + 1], number + (i - 4) / 2) end
return (#ARGV - 3) / 2
