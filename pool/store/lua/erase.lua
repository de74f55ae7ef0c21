-- erase: forget an ended job at its owner's wish: record, log and input, and have its Celery result forgotten. Its id
-- answers as one that never was, and no resend brings it back. Blocks of a large input that another record keeps, or
-- an unended job holds, stay for as long as those need them.
-- KEY job hash
-- KEY log list
-- KEY outbox zset
-- KEY tombstone string
-- KEYS blocks hash those of its input, in order
-- INCLUDE clock kept inputs
-- FLAGS allow-oom
-- RETURN {"ok"} | {"live", state} | {"gone"} | {"blocks", ids} to be declared
local seen = redis.call('HMGET', job, 'state', 'tombstone_ms', 'blocks', 'kept_ms', 'celery', 'task_id')
if not seen[1] then return {'gone'} end
if seen[1] == 'queued' or seen[1] == 'running' then return {'live', seen[1]} end
local unknown = undeclared(seen[3], blocks)
if unknown then return unknown end
local at_ms = now_ms()
for _, block in ipairs(blocks) do
  local keep_ms = tonumber(redis.call('HGET', block, 'until_ms'))
  if keep_ms then settle(block, math.min(keep_ms, count_kept(block, tonumber(seen[4]) or 0, -1, at_ms))) end
end
local left_ms = math.max(redis.call('PTTL', job), 0)
redis.call('DEL', job, log)
redis.call('SET', tombstone, 'erased', 'PX', math.max(left_ms + tonumber(seen[2]), 1))
if seen[5] == '1' then redis.call('ZADD', outbox, at_ms, 'erased:' .. seen[6]) end
return {'ok'}
